"""Measures the work done under overload by closed-loop clients of every kind: `python -m loadtest.stress.goodput`.

There are five kinds of clients. They request the embedding of single texts, of 32 and of 256 texts, attention maps, and generated text.
There are 8 clients in total (about the knee), then 64, then 256. Each sends again as soon as it is answered or refused, and ignores
`Retry-After`. The cost of a token depends on the kind, so the work done is a sum over the kinds: tokens/s divided by the tokens/s of 8
clients of this kind alone. Required: 64 and 256 clients get at least 0.8 of the work done for 8 clients.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer

from loadtest.common import machine
from loadtest.common.server import attnserve
from loadtest.common.texts import sentence

LEAST = 0.8
_ALONE = 8  # number of clients in each run for comparison, in which all clients are of one kind
KINDS = ("single", "32", "256", "attention", "text")
app = typer.Typer(add_completion=False)


@dataclass
class Counted:
    """Counts of requests and tokens, for one kind of client or for all kinds."""

    answered: int = 0
    refused: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)


def body(kind: str, draw: random.Random, encoder: str, decoder: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a new request of a client of this kind."""
    text = partial(sentence, draw)
    if kind == "attention":
        return "/v1/attention", {"model": encoder, "input": text(12), "layers": [-1], "average_heads": True}
    if kind == "text":
        return "/v1/completions", {"model": decoder, "prompt": text(8), "max_tokens": 64, "ignore_eos": True}
    size = 1 if kind == "single" else int(kind)
    return "/v1/embeddings", {"model": encoder, "input": [text(draw.randint(6, 40)) for _ in range(size)], "encoding_format": "base64"}


async def measured(url: str, kinds: Sequence[str], clients: int, seconds: float, encoder: str, decoder: str) -> dict[str, Counted]:
    """Run the clients, divided equally among the kinds, and return the counts by kind."""
    counts = {kind: Counted() for kind in kinds}

    async def one(number: int) -> None:
        kind, draw = kinds[number % len(kinds)], random.Random(f"{clients} {number} {time.time()}")
        count = counts[kind]
        while time.monotonic() < end:
            path, content = body(kind, draw, encoder, decoder)
            since = time.monotonic()
            try:
                async with http.post(path, json=content) as answer:
                    said = await answer.read()
            except (aiohttp.ClientError, TimeoutError):
                count.failed += 1
                continue
            now = time.monotonic()
            if not began <= now < end:
                continue
            if answer.status == 200:
                count.answered += 1
                count.tokens += json.loads(said)["usage"]["total_tokens"]
                count.seconds.append(now - since)
            elif answer.status in (429, 503):
                count.refused += 1
            else:
                count.failed += 1

    # aiohttp is used instead of httpx, which scans all its connections at each request. With 256 clients this takes longer than an answer.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(120)) as http:
        began = time.monotonic() + 0.2 * seconds  # requests before this time are not counted
        end = began + seconds
        await asyncio.gather(*(one(number) for number in range(clients)))
    return counts


@app.command()
def goodput(
    encoder: Annotated[Path, typer.Option(help="Bundle with an attention graph.")] = Path("bundles/all-MiniLM-L6-v2"),
    decoder: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    seconds: Annotated[float, typer.Option(min=1, help="Of each stage.")] = 60,
    clients: Annotated[str, typer.Option(help="Of each stage; the first is the knee.")] = "8,64,256",
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("out/goodput.json"),
) -> None:
    """Start the service with default settings, load it, and print the work done for each kind of request."""
    figures: dict[str, Any] = {}
    work: list[float] = []
    names = encoder.name, decoder.name
    with attnserve(encoder, encoder.name, flags=["--bundle", str(decoder)]) as server:
        url = server.address
        alone = {kind: asyncio.run(measured(url, [kind], _ALONE, seconds / 2, *names))[kind].tokens * 2 / seconds for kind in KINDS}
        print("alone: " + ", ".join(f"{kind} {rate:.0f}" for kind, rate in alone.items()) + " tokens/s")
        for count in map(int, clients.split(",")):
            by_kind = asyncio.run(measured(url, KINDS, count, seconds, *names))
            for kind, each in by_kind.items():
                p50 = sorted(each.seconds)[len(each.seconds) // 2] if each.seconds else float("nan")
                print(
                    f"{count:4} clients {kind:>9}: {each.tokens / seconds:8.0f} tokens/s {each.answered / seconds:7.2f} answered/s "
                    f"{each.refused / seconds:7.2f} refused/s {each.failed:3} failed  p50 {p50:.2f} s"
                )
            work.append(sum(each.tokens / seconds / alone[kind] for kind, each in by_kind.items()))
            print(f"{count:4} clients       all: {work[-1]:.2f} of the work of one kind alone, {work[-1] / work[0]:.2f} of the first stage")
            figures[str(count)] = {kind: vars(each) for kind, each in by_kind.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine.describe(), "alone_tokens_per_s": alone, "work": work, "stages": figures}))
    starved = [kind for stage in figures.values() for kind, each in stage.items() if not each["answered"]]
    if min(work) < LEAST * work[0] or starved:
        sys.exit(f"goodput is below {LEAST} of the first stage, or a kind had no share: {starved}")


if __name__ == "__main__":
    app()
