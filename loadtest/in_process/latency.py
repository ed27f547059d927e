"""Measures the time between two deltas (pieces of text) of running streams, undisturbed and while the engine prefills a long prompt."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import uvloop

from loadtest.in_process.engine import running

STREAMS = 8
PROMPT_TOKENS = 8_000


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Seconds between two consecutive deltas of a stream, for all streams together: undisturbed, and while a long prompt is prefilled."""

    undisturbed: tuple[float, ...]
    during: tuple[float, ...]  # waits in seconds during the prefill of the long prompt
    prompt_s: float  # seconds from the long prompt's arrival to its first token


def waits(bundle: Path, seconds: float, threads: int) -> Waits:
    """Measure the waits of STREAMS streams with a message for each token: first for `seconds`, then while the engine prefills a prompt of
    PROMPT_TOKENS."""

    async def measured() -> Waits:
        async with running(bundle, STREAMS + 1, threads, every_s=0) as engine, engine.endless(STREAMS) as streams:
            begun = time.perf_counter()
            await asyncio.sleep(seconds)
            arrived = time.perf_counter()
            await engine.submit(STREAMS, prompt_tokens=PROMPT_TOKENS, max_tokens=1).read()
            done = time.perf_counter()
            for stream in streams:
                await stream.after(done)
            read_at = [list(stream.read_at) for stream in streams]
        return Waits(undisturbed=between(read_at, begun, arrived), during=overlapping(read_at, arrived, done), prompt_s=done - arrived)

    return uvloop.run(measured())


def between(read_at: Sequence[Sequence[float]], begun: float, ended: float) -> tuple[float, ...]:
    """Return the waits between two deltas that lie entirely between `begun` and `ended`. `read_at` has the read times of each stream."""
    return tuple(after - before for before, after in _pairs(read_at) if begun <= before and after <= ended)


def overlapping(read_at: Sequence[Sequence[float]], begun: float, ended: float) -> tuple[float, ...]:
    """Return the waits between two deltas that overlap the time from `begun` to `ended`. `read_at` has the read times of each stream."""
    return tuple(after - before for before, after in _pairs(read_at) if before < ended and after > begun)


def percentile(waits: Sequence[float], percent: float) -> float:
    return float(np.percentile(waits, percent))


def _pairs(read_at: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    return [pair for moments in read_at for pair in pairwise(moments)]
