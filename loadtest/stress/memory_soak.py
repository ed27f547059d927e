"""Measures whether memory is freed after unusual requests: `python -m loadtest.stress.memory_soak`.

The requests are for long texts, attention maps, token embeddings, the tokenization of a large text, and large batches. They are sent in
rounds, with a pause after each for the service to free memory. Required: memory at the end is at most 10 % above memory at the beginning.
"""

import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from loadtest.common import memory
from loadtest.common.server import attnserve
from loadtest.common.texts import sentence

MOST_GROWTH = 1.10
PAUSE_S = 8.0
app = typer.Typer(add_completion=False)


def requests(draw: random.Random, encoder: str, long: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the paths and bodies of one round."""
    text = partial(sentence, draw)
    return [
        ("/v1/embeddings", {"model": long, "input": text(5000)}),
        ("/v1/attention", {"model": encoder, "input": text(80), "average_heads": True}),
        ("/embed_all", {"model": encoder, "inputs": [text(100) for _ in range(64)]}),
        ("/tokenize", {"model": encoder, "inputs": text(60_000)}),
        ("/v1/embeddings", {"model": encoder, "input": [text(12) for _ in range(512)]}),
    ]


@app.command()
def soak(
    encoder: Annotated[Path, typer.Option(help="Bundle with an attention graph.")] = Path("bundles/all-MiniLM-L6-v2"),
    long: Annotated[Path, typer.Option(help="Bundle that takes long texts.")] = Path("bundles/all-MiniLM-L6-v2-linear"),
    rounds: Annotated[int, typer.Option(min=1)] = 4,
) -> None:
    """Start the service with default settings, send unusual requests, and print its memory (PSS of all processes) after each round."""
    draw = random.Random(1)
    with (
        attnserve(encoder, encoder.name, flags=["--bundle", str(long)]) as server,
        httpx.Client(base_url=server.address, timeout=300) as http,
    ):

        def held() -> float:
            time.sleep(PAUSE_S)
            return sum(process.pss_bytes for process in memory.measure(server.pid)) / 2**20

        # Send a first request to each route, because it opens resources that must not count as growth.
        for model in (encoder.name, long.name):
            for path in ("/v1/embeddings", "/v1/attention"):
                http.post(path, json={"model": model, "input": "the first text", **({} if "emb" in path else {"layers": [0]})})
        begin = end = held()
        print(f"begin {begin:7.0f} MiB")
        for number in range(rounds):
            for path, body in requests(draw, encoder.name, long.name):
                answer = http.post(path, json=body)
                print(f"  {path:<16} {answer.status_code} {len(answer.content):>10} bytes")
            end = held()
            print(f"round {number} {end:7.0f} MiB, {end / begin:.2f} of the beginning")
    if end > MOST_GROWTH * begin:
        sys.exit(f"the service holds {end:.0f} MiB and began with {begin:.0f}: over {MOST_GROWTH} times as much")


if __name__ == "__main__":
    app()
