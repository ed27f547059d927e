"""Measures static embeddings: the tokenizer alone, the engine, the service over HTTP, and sentence-transformers, in turns.

`python -m loadtest.in_process.static --bundle bundles/wordllama` prints texts a second of each, as medians of the rounds. Every request
has 32 texts of 14 words. No text is sent to the engine or the service twice.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from export import contract
from loadtest.common import texts, wrk
from loadtest.common.server import MeasuredServer, attnserve
from service.call import Call
from service.catalog import Catalog
from service.encoding.request import EncodeRequest
from service.settings import Settings

REQUEST_TEXTS = 32
CONCURRENT = 8  # requests at a time
MOST_TEXTS_PER_S = 60_000  # more texts are prepared than a measurement can use

Measure = Callable[[Iterator[list[str]], float], float]


def requests(count: int, seed: str) -> Iterator[list[str]]:
    """Yield `count` requests of new texts."""
    made = iter(texts.short(count * REQUEST_TEXTS, seed))
    return iter([list(itertools.islice(made, REQUEST_TEXTS)) for _ in range(count)])


def per_s(answer: Callable[[list[str]], Any]) -> Measure:
    """Return a measurement of a function that computes one request at a time."""

    def measured(work: Iterator[list[str]], seconds: float) -> float:
        again = itertools.cycle(list(work))  # neither remembers a text
        answer(next(again))
        started, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - started) < seconds:
            answer(next(again))
            count += REQUEST_TEXTS
        return count / elapsed

    return measured


def sentence_transformers(bundle: Path) -> Callable[[list[str]], Any]:
    """Return `encode` of sentence-transformers with the bundle's table and tokenizer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from tokenizers import Tokenizer

    graph = onnx.load(bundle / contract.GRAPH).graph
    table = max((numpy_helper.to_array(each) for each in graph.initializer), key=lambda array: array.size)[:-1]  # its last row is padding
    module = StaticEmbedding(Tokenizer.from_file(str(bundle / contract.TOKENIZER)), embedding_weights=np.array(table, np.float32))
    model = SentenceTransformer(modules=[module, Normalize()], device="cpu")
    return lambda batch: model.encode(batch, batch_size=REQUEST_TEXTS, show_progress_bar=False)


def engine(bundle: Path) -> Measure:
    """Return a measurement of the engine without HTTP, with CONCURRENT requests at a time."""

    async def measured(work: Iterator[list[str]], seconds: float) -> float:
        catalog = Catalog(Settings.model_validate({"bundles": (bundle,)}))
        await asyncio.to_thread(catalog.load)
        catalog.start()
        model: Any = next(iter(catalog.models.values()))
        end, count, started = time.perf_counter() + seconds, 0, time.perf_counter()

        async def client() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await model.answer(EncodeRequest(inputs=list(next(work))), Call("bench", time.monotonic()))
                count += REQUEST_TEXTS

        await asyncio.gather(*(client() for _ in range(CONCURRENT)))
        elapsed = time.perf_counter() - started
        await catalog.stop()
        return count / elapsed

    return lambda work, seconds: asyncio.run(measured(work, seconds))


def over_http(server: MeasuredServer, encoding: str) -> Measure:
    """Return a measurement of a running server, with CONCURRENT connections. `encoding` is OpenAI's encoding_format."""

    def measured(work: Iterator[list[str]], seconds: float) -> float:
        bodies = [json.dumps({"model": server.model, "input": batch, "encoding_format": encoding}) for batch in work]
        load = wrk.run(server.url, bodies, connections=CONCURRENT, seconds=seconds)
        if load.problems:
            raise SystemExit(f"the run is not valid: {', '.join(load.problems)}")
        return load.per_s * REQUEST_TEXTS

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, default=Path("bundles/wordllama"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    from service.tokenization.texts import Cut, TextEncoder

    manifest = contract.read_manifest(arguments.bundle)
    tokens = TextEncoder(
        arguments.bundle / contract.TOKENIZER,
        max_tokens=manifest.limits.max_tokens,
        vocab_size=manifest.limits.vocab_size,
        pair_types=False,
        prompts={},
        default_prompt=None,
    )
    with attnserve(arguments.bundle, manifest.name) as server:
        rows: dict[str, Measure] = {
            "tokenizer, one thread": per_s(lambda batch: tokens.encode(batch, cut=Cut())),
            "sentence-transformers, encode": per_s(sentence_transformers(arguments.bundle)),
            "attnserve, engine": engine(arguments.bundle),
            "attnserve, HTTP, base64": over_http(server, "base64"),
            "attnserve, HTTP, numbers": over_http(server, "float"),
        }
        found: dict[str, list[float]] = {name: [] for name in rows}
        count = round(MOST_TEXTS_PER_S * arguments.seconds / REQUEST_TEXTS)
        for number in range(arguments.rounds):
            for name, measure in rows.items():
                found[name].append(measure(requests(count, f"{number} {name}"), arguments.seconds))
    for name, rates in found.items():
        print(f"{name:32} {statistics.median(rates):10,.0f} texts/s  ({min(rates):,.0f} to {max(rates):,.0f})")


if __name__ == "__main__":
    main()
