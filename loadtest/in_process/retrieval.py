"""The part `retrieval`: what search asks of an encoder, without HTTP: several outputs of one run, MaxSim, chunks in context, long texts
that are cut, and SPLADE beside sentence-transformers. Each step uses the first `--bundle` that has its outputs.
"""

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from export import contract
from loadtest.common import texts
from loadtest.common.benchmark import Benchmark, Figures, Plan, Side
from loadtest.common.report import Bar, Row
from loadtest.in_process.engine import opened
from service.call import Call
from service.dialects.chunks import Chunks, embed_chunks
from service.dialects.ranking import RerankRequest, rank
from service.encoding.model import Model
from service.encoding.request import EncodeRequest
from service.encoding.token_matrix import maxsim
from service.tokenization.texts import Cut

SERVICE, PEER = "attnserve", "sentence-transformers"
BATCH = 32
DOCUMENTS, DOCUMENT_TOKENS, QUERY_TOKENS, WIDTH = 100, 180, 32, 128  # of the scoring
TEXTS, CHUNK_TOKENS, LONG_TOKENS, WINDOW_TOKENS = 8, 64, 8_192, 512  # of the chunks
_LATE, _WINDOWS = ("late", "chunks"), ("windows", "chunks")
SHORT_CHARACTERS, LONG_CHARACTERS = 2_000, 10_000_000  # of a text that is cut


def benchmark(plan: Plan) -> Benchmark:
    manifests = {bundle: contract.verify(bundle) for bundle in plan.bundles}
    seconds = plan.seconds

    def first(*outputs: contract.Output, least_tokens: int = 0) -> Path | None:
        fits = (each for each, about in manifests.items() if set(outputs) <= set(about.outputs) and about.limits.max_tokens >= least_tokens)
        return next(fits, None)

    wanted: list[tuple[str, str, Path | None, Callable[[Path, float], Figures]]] = [
        (SERVICE, "outputs", first("dense", "sparse", "multivector"), outputs),
        (SERVICE, "rerank", first("multivector"), reranked),
        (SERVICE, "cut", first("dense"), cut),
        (SERVICE, "splade", first("sparse"), splade),
        ("late", "chunks", first("dense", least_tokens=LONG_TOKENS), partial(chunked, mode="late", read=LONG_TOKENS)),
        ("windows", "chunks", first("dense"), partial(chunked, mode="late", read=WINDOW_TOKENS)),
        (PEER, "splade", Path(plan.options["splade"]) if plan.options["splade"] else None, peer),
    ]
    steps: dict[str, dict[str, Callable[[Any], Figures]]] = {SERVICE: {"maxsim": lambda _: scored()}}
    for side, step, folder, measure in wanted:
        if folder is not None:
            steps.setdefault(side, {})[step] = partial(_of, measure, folder, seconds)
    absent = {side: "no --bundle has its outputs, or --set splade=FOLDER is missing" for side, *_ in wanted if side not in steps}

    def here(figure: str) -> tuple[str, str]:
        return SERVICE, figure

    dense, first_query, peer_texts = here("dense"), here("first"), (PEER, "sparse")
    rows = [
        Row("dense, sparse and multivector of a text", "texts/s", here("three"), dense, Bar(reference="dense alone", at_least=1 / 1.15)),
        Row("MaxSim of 32 vectors and 100 documents of 180", "ms", here("maxsim"), bar=Bar(at_most=15)),
        Row("another query against 100 documents", "1/s", here("again"), first_query, Bar(reference="the first", at_least=20)),
        Row("chunks in 8,192 tokens of context", "chunks/s", _LATE, _WINDOWS, Bar(reference="shorter windows", at_least=2)),
        Row("10 MB cut to what the model reads", "ms", here("long"), here("short"), Bar(reference="2 KB", at_most_more=2)),
        Row("SPLADE, batches of 32", "texts/s", here("sparse"), peer_texts, Bar(reference=PEER, at_least=2)),
    ]
    return Benchmark([Side(name, each, optional=name == PEER) for name, each in steps.items()], rows, absent)


def _of(measure: Callable[[Path, float], Figures], folder: Path, seconds: float, _: object) -> Figures:
    return measure(folder, seconds)


def opened_model(bundle: Path, work: Callable[[Any, Model], Awaitable[Figures]], **settings: Any) -> Figures:
    async def measured() -> Figures:
        async with opened(bundle, **settings) as catalog:
            model: Any = next(iter(catalog.models.values()))
            return await work(catalog, model)

    return uvloop.run(measured())


async def per_s(seconds: float, batch: Callable[[int], Sequence[str]], answer: Callable[[Sequence[str]], Awaitable[Any]]) -> float:
    """Return how many of the texts of `batch(number)` are answered in a second."""
    await answer(batch(0))
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        some = batch(count + 1)
        await answer(some)
        count += len(some)
    return count / elapsed


def call() -> Call:
    return Call("bench", time.monotonic())


def outputs(bundle: Path, seconds: float) -> Figures:
    async def work(_: Any, model: Model) -> Figures:
        def answer(*names: contract.Output) -> Callable[[Sequence[str]], Awaitable[Any]]:
            return lambda some: model.answer(EncodeRequest(inputs=list(some), outputs=model.tensors(names), number_bytes=0), call())

        one = lambda number: texts.short(1, f"{number}")  # noqa: E731
        return {
            "dense": await per_s(seconds, one, answer("dense")),
            "three": await per_s(seconds, one, answer("dense", "sparse", "multivector")),
        }

    return opened_model(bundle, work)


def scored() -> Figures:
    """Measure the scoring alone, on one thread: the median of 15."""
    draw = np.random.default_rng(0)

    def matrix(n: int) -> Any:
        rows = draw.standard_normal((n, WIDTH))
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16)

    query, documents, times = matrix(QUERY_TOKENS), [matrix(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)], []
    for _ in range(15):
        started = time.perf_counter()
        for document in documents:
            maxsim(query, document)
        times.append(time.perf_counter() - started)
    return {"maxsim": float(np.median(times)) * 1e3}


def reranked(bundle: Path, seconds: float) -> Figures:
    async def work(catalog: Any, model: Model) -> Figures:
        documents = [texts.words(random.Random(at), DOCUMENT_TOKENS) for at in range(DOCUMENTS)]
        times = []
        for query in ("how are kernels approximated", "what does a state keep", "where is the river"):
            started = time.perf_counter()
            await rank(RerankRequest.model_validate({"query": query, "documents": documents}), call(), catalog)
            times.append(time.perf_counter() - started)
        return {"first": 1 / times[0], "again": 1 / times[-1]}

    return opened_model(bundle, work, cache_bytes=2**30)


def chunked(bundle: Path, seconds: float, *, mode: str, read: int) -> Figures:
    async def work(_: Any, model: Model) -> Figures:
        how = Chunks.model_validate({"size": CHUNK_TOKENS, "mode": mode})
        long = [texts.prose(random.Random(at), LONG_TOKENS) for at in range(TEXTS)]
        model.texts.max_tokens = min(read, model.texts.max_tokens)
        started = time.perf_counter()
        answer = await embed_chunks(model, long, how, call())
        count = sum(len(row) for row in answer.rows if isinstance(row, list))
        return {"chunks": count / (time.perf_counter() - started)}

    return opened_model(bundle, work)


def cut(bundle: Path, seconds: float) -> Figures:
    async def work(_: Any, model: Model) -> Figures:
        prose = texts.prose(random.Random(0), LONG_CHARACTERS // 4)
        figures = {}
        for name, size in (("short", SHORT_CHARACTERS), ("long", LONG_CHARACTERS)):
            times = []
            for _ in range(3):
                started = time.perf_counter()
                model.texts.encode([prose[:size]], cut=Cut())
                times.append(time.perf_counter() - started)
            figures[name] = float(np.median(times)) * 1e3
        return figures

    return opened_model(bundle, work)


def splade(bundle: Path, seconds: float) -> Figures:
    async def work(_: Any, model: Model) -> Figures:
        tensors = model.tensors(["sparse"])
        answer = lambda some: model.answer(EncodeRequest(inputs=list(some), outputs=tensors, number_bytes=0), call())  # noqa: E731
        return {"sparse": await per_s(seconds, lambda number: texts.mixed(BATCH, f"{number}"), answer)}

    return opened_model(bundle, work)


def peer(checkpoint: Path, seconds: float) -> Figures:
    """Measure `encode` of sentence-transformers' SparseEncoder with the weights of a folder, in batches of BATCH."""
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(checkpoint), device="cpu")

    async def answer(some: Sequence[str]) -> None:
        model.encode(list(some), batch_size=BATCH, show_progress_bar=False)

    return {"sparse": uvloop.run(per_s(seconds, lambda number: texts.mixed(BATCH, f"{number}"), answer))}
