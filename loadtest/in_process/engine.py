"""Measures the generation engine without HTTP, opened as the service opens it. All runs sample at temperature 1 and are read in this
process."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from loadtest.errors import LoadtestError
from service.catalog import Catalog
from service.generation.request import GenerationRequest, Sampling
from service.generation.run import Run
from service.settings import Settings

PROMPT_TOKENS = 8
STREAMS, LONG_PROMPT = 8, 8_000  # of `waits_s`: running streams, and the tokens of the prompt that is fed meanwhile
_ENDLESS = 10_000_000


@asynccontextmanager
async def opened(bundle: Path, **settings: Any) -> AsyncIterator[Catalog]:
    """Open a bundle in this process, and close it at the end of the `with` block."""
    given = {"bundles": [str(bundle)], "states": "memory", "prefix_cache_bytes": 0, "cache_bytes": 0, **settings}
    catalog = Catalog(Settings.model_validate(given))
    await asyncio.to_thread(catalog.load)
    catalog.start()
    try:
        yield catalog
    finally:
        await catalog.stop()


@dataclass
class TimedStream:
    """A run, with the times at which its deltas were read (time.perf_counter())."""

    run: Run
    read_at: list[float] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, every_s: float = 0.0) -> None:
        """Read the run to its end: each delta as it arrives, or every `every_s` seconds all deltas since the last read."""
        async for _ in self.run:
            self.read_at.append(time.perf_counter())
            self._changed.set()
            if every_s:
                await asyncio.sleep(every_s)

    async def after(self, moment: float) -> None:
        """Wait until a delta has been read after `moment` (time.perf_counter())."""
        while not self.read_at or self.read_at[-1] <= moment:
            self._changed.clear()
            await self._changed.wait()


async def submit(catalog: Catalog, seed: int, *, prompt_tokens: int = PROMPT_TOKENS, max_tokens: int = _ENDLESS) -> TimedStream:
    model = catalog.generator(None)
    prompt = tuple((seed + at) % model.manifest.limits.vocab_size for at in range(prompt_tokens))
    request = GenerationRequest(prompt=prompt, sampling=Sampling(seed=seed), max_tokens=max_tokens, ignore_eos=True)
    (run,) = await model.engine.open([request], "")
    return TimedStream(run)


async def texts(catalog: Catalog, rows: int, first: int, **lengths: int) -> list[TimedStream]:
    """Generate `rows` texts at the same time, read each to its end, and return them."""
    streams = [await submit(catalog, first + seed, **lengths) for seed in range(rows)]
    await asyncio.gather(*(stream.read() for stream in streams))
    return streams


@asynccontextmanager
async def endless(catalog: Catalog, rows: int, every_s: float) -> AsyncIterator[list[TimedStream]]:
    """Yield `rows` endless runs once all have started, and cancel them at the end of the `with` block. Each is read every `every_s`
    seconds; 0: as soon as it has a delta. Raises LoadtestError if one of them ends."""
    streams = [await submit(catalog, seed) for seed in range(rows)]
    reading = [asyncio.create_task(stream.read(every_s)) for stream in streams]
    try:
        for stream in streams:
            await stream.after(0.0)
        yield streams
        if any(task.done() for task in reading):
            raise LoadtestError("an endless run has ended too early")
    finally:
        for stream in streams:
            stream.run.cancel()
        await asyncio.gather(*reading)


def tokens_per_s(bundle: Path, rows: int, seconds: float) -> float:
    """Return the tokens per second of `rows` endless runs together, measured for `seconds` after all have started. The runs are read as
    often as the service reads runs."""

    async def measured() -> float:
        every_s: float = Settings.model_fields["stream_interval_s"].default
        async with opened(bundle, slots=rows) as catalog, endless(catalog, rows, every_s) as streams:
            before, started = _n_tokens(streams), time.perf_counter()
            await asyncio.sleep(seconds)
            return (_n_tokens(streams) - before) / (time.perf_counter() - started)

    return uvloop.run(measured())


def texts_s(bundle: Path, rows: int, *, max_tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> float:
    """Return the seconds in which `rows` texts are generated at the same time, from the first prompt to the last token. As many texts after
    short prompts are generated before, which do not count."""

    async def measured() -> float:
        async with opened(bundle, slots=rows) as catalog:
            await texts(catalog, rows, rows, max_tokens=max_tokens)
            started = time.perf_counter()
            await texts(catalog, rows, 0, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
            return time.perf_counter() - started

    return uvloop.run(measured())


def waits_s(bundle: Path, seconds: float) -> tuple[list[float], list[float]]:
    """Return the seconds between two deltas of STREAMS streams with a message for each token: for `seconds`, and then while the engine
    prefills a prompt of LONG_PROMPT tokens."""

    async def measured() -> tuple[list[float], list[float]]:
        async with opened(bundle, slots=STREAMS + 1, stream_interval_s=0) as catalog, endless(catalog, STREAMS, 0.0) as streams:
            begun = time.perf_counter()
            await asyncio.sleep(seconds)
            arrived = time.perf_counter()
            await texts(catalog, 1, STREAMS, prompt_tokens=LONG_PROMPT, max_tokens=1)
            done = time.perf_counter()
            for stream in streams:
                await stream.after(done)
            read_at = [list(stream.read_at) for stream in streams]
        return overlapping(read_at, begun, arrived), overlapping(read_at, arrived, done)

    return uvloop.run(measured())


def overlapping(read_at: Sequence[Sequence[float]], begun: float, ended: float) -> list[float]:
    """Return the waits between two deltas that overlap the time from `begun` to `ended`. `read_at` has the read times of each stream."""
    pairs = (pair for moments in read_at for pair in pairwise(moments))
    return [after - before for before, after in pairs if before < ended and after > begun]


def _n_tokens(streams: list[TimedStream]) -> int:
    return sum(stream.run.usage.completion_tokens for stream in streams)
