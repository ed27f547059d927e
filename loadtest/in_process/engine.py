"""Measures the generation engine without HTTP. All runs sample at temperature 1 and are read in this process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from export import contract
from loadtest.errors import LoadtestError
from loadtest.in_process.steps import open_steps
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.request import GenerationRequest, Sampling
from service.generation.run import Run
from service.generation.sampling.grammar import Grammars
from service.generation.text import Vocabulary
from service.runtime.garbage import keep_loaded
from service.runtime.pacing import hand_over_s
from service.settings import Settings
from service.telemetry.metrics import GeneratorMetrics, Metrics

PROMPT_TOKENS = 8
EVERY_S: float = Settings.model_fields["stream_interval_s"].default
_ENDLESS = 10_000_000


@dataclass
class TimedStream:
    """A run, with the times at which its deltas were read (time.perf_counter())."""

    run: Run
    read_at: list[float] = field(default_factory=list)
    _ended: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, every_s: float = 0.0) -> None:
        """Read the run to its end: each delta as it arrives, or every `every_s` seconds all deltas since the last read."""
        try:
            async for _ in self.run:
                self.read_at.append(time.perf_counter())
                self._changed.set()
                if every_s:
                    await asyncio.sleep(every_s)
        finally:
            self._ended = True
            self._changed.set()

    async def after(self, moment: float) -> None:
        """Wait until a delta has been read after `moment` (time.perf_counter()). Raises LoadtestError if the run ends first."""
        while not self.read_at or self.read_at[-1] <= moment:
            if self._ended:
                raise LoadtestError("an endless run has ended too early")
            self._changed.clear()
            await self._changed.wait()


class MeasuredEngine:
    """A running engine to which random prompts can be submitted."""

    def __init__(self, engine: GeneratorEngine, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size

    def submit(self, seed: int, *, prompt_tokens: int = PROMPT_TOKENS, max_tokens: int = _ENDLESS) -> TimedStream:
        prompt = tuple((seed + at) % self._vocab_size for at in range(prompt_tokens))
        request = GenerationRequest(prompt=prompt, sampling=Sampling(seed=seed), max_tokens=max_tokens, ignore_eos=True)
        return TimedStream(self._engine.submit(request))

    @asynccontextmanager
    async def endless(self, rows: int, every_s: float = 0.0) -> AsyncIterator[list[TimedStream]]:
        """Yield `rows` endless runs once all have started, and cancel them at the end of the `with` block. Each is read every `every_s`
        seconds; 0: as soon as it has a delta."""
        streams = [self.submit(seed) for seed in range(rows)]
        reading = [asyncio.create_task(stream.read(every_s)) for stream in streams]
        try:
            for stream in streams:
                await stream.after(0.0)
            yield streams
        finally:
            for stream in streams:
                stream.run.cancel()
            await asyncio.gather(*reading)


@asynccontextmanager
async def running(bundle: Path, slots: int, threads: int, every_s: float = EVERY_S) -> AsyncIterator[MeasuredEngine]:
    """Start an engine for the bundle as the service does for streams with a message every `every_s` seconds, and stop it at the end of the
    `with` block.
    """
    session = open_steps(bundle, threads, share_out=True)
    file = bundle / contract.TOKENIZER
    engine = GeneratorEngine(
        session,
        Vocabulary(file),
        eos_token_ids=session.decoder.eos_token_ids,
        grammars=Grammars(file, ()),
        numerics="0",
        limits=GeneratorLimits(slots=slots, hand_over_s=hand_over_s(every_s)),
        metrics=GeneratorMetrics(Metrics(), "bench"),
    )
    engine.start()
    keep_loaded()
    try:
        yield MeasuredEngine(engine, session.vocab_size)
    finally:
        await engine.stop()


def tokens_per_s(bundle: Path, rows: int, seconds: float, threads: int) -> float:
    """Return the tokens per second of `rows` endless runs together, measured for `seconds` after all have started. The runs are read as
    often as the service reads runs."""

    async def measured() -> float:
        async with running(bundle, rows, threads) as engine, engine.endless(rows, EVERY_S) as streams:
            before, started = _n_tokens(streams), time.perf_counter()
            await asyncio.sleep(seconds)
            return (_n_tokens(streams) - before) / (time.perf_counter() - started)

    return uvloop.run(measured())


def texts_tokens_per_s(bundle: Path, rows: int, new_tokens: int, threads: int) -> float:
    """Return the tokens per second of `rows` texts together, which are generated at the same time with `new_tokens` each. The time counts
    from the first prompt to the last token. As many texts are generated before, which do not count."""

    async def measured() -> float:
        async with running(bundle, rows, threads) as engine:
            await asyncio.gather(*(engine.submit(rows + seed, max_tokens=new_tokens).read() for seed in range(rows)))
            started = time.perf_counter()
            streams = [engine.submit(seed, max_tokens=new_tokens) for seed in range(rows)]
            await asyncio.gather(*(stream.read() for stream in streams))
            return _n_tokens(streams) / (time.perf_counter() - started)

    return uvloop.run(measured())


def prefill_tokens_per_s(bundle: Path, prompt_tokens: int, threads: int) -> float:
    """Return the prompt tokens per second at which the engine prefills one prompt, with no other run. The time includes one new token."""

    async def measured() -> float:
        async with running(bundle, 1, threads) as engine:
            await engine.submit(0, max_tokens=1).read()  # warm up: the runtime's first call is slower
            started = time.perf_counter()
            await engine.submit(1, prompt_tokens=prompt_tokens, max_tokens=1).read()
            return prompt_tokens / (time.perf_counter() - started)

    return uvloop.run(measured())


def _n_tokens(streams: list[TimedStream]) -> int:
    return sum(stream.run.usage.completion_tokens for stream in streams)
