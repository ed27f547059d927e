"""Measures the cost of checkpoints: an engine stores the state of each run at regular intervals, so that another engine can continue it.
The same runs are measured in turns with and without checkpoints, in one engine with a store on disk."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from loadtest.in_process.engine import EVERY_S, PROMPT_TOKENS, TimedStream
from service.catalog import Catalog
from service.generation import sequence
from service.generation.model import DecoderModel
from service.generation.request import GenerationRequest, Sampling
from service.generation.saved.keeper import StateKeeper
from service.settings import Settings
from service.states.record import new_state_id

ROWS = 32
EVERY = sequence.CHECKPOINT_TOKENS
PAIRS = 20  # number of periods that are measured with checkpoints, and as many without
_SETTLE_S = 0.3  # wait after switching checkpoints on or off, until overdue and unfinished checkpoints are written
_ENDLESS = 10_000_000


@dataclass(frozen=True)
class Stretch:
    """One measured period. `per_s`: tokens per second of all runs together. `cpu_us`: CPU time of this process per token in us."""

    per_s: float
    cpu_us: float


@dataclass(frozen=True)
class Price:
    """The measured periods with checkpoints, and those without. `per_s`: checkpoints per second in the periods with checkpoints."""

    with_checkpoints: tuple[Stretch, ...]
    without: tuple[Stretch, ...]
    per_s: float


class _Switched(StateKeeper):
    """A state keeper that counts checkpoints, and writes none while `on` is False."""

    on = True
    written = 0

    @property
    def has_room(self) -> bool:
        return self.on and super().has_room

    def checkpoint(self, *given: object, **named: object) -> object:  # type: ignore[override]
        self.written += 1
        return super().checkpoint(*given, **named)  # type: ignore[arg-type]


class _Catalog(Catalog):
    keeper: _Switched

    def _keeper(self, model: DecoderModel, numerics: str) -> StateKeeper:
        keeper = super()._keeper(model, numerics)
        keeper.__class__ = _Switched
        assert isinstance(keeper, _Switched)
        self.keeper = keeper
        return keeper


def price(bundle: Path, folder: Path, seconds: float) -> Price:
    """Measure periods of `seconds` each, with `ROWS` endless runs and a store in `folder`."""

    async def measured() -> Price:
        given = {"bundles": [str(bundle)], "states": str(folder), "slots": ROWS, "prefix_cache_bytes": 0}
        catalog = _Catalog(Settings.model_validate(given))
        await asyncio.to_thread(catalog.load)
        catalog.start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(catalog.stop)
            streams = await _endless(catalog, stack)
            on: list[Stretch] = []
            off: list[Stretch] = []
            written = 0
            for number in range(PAIRS):
                for catalog.keeper.on in (True, False) if number % 2 else (False, True):
                    await asyncio.sleep(_SETTLE_S)
                    before = catalog.keeper.written
                    (on if catalog.keeper.on else off).append(await _stretch(streams, seconds))
                    written += catalog.keeper.written - before
        return Price(tuple(on), tuple(off), written / PAIRS / seconds)

    return asyncio.run(measured())


async def _endless(catalog: Catalog, stack: AsyncExitStack) -> list[TimedStream]:
    """Start the runs and return their streams. Their prompts differ in length, so that their checkpoints are due at different times."""
    model = catalog.generator(None)
    vocab_size = model.manifest.limits.vocab_size
    streams = []
    for row in range(ROWS):
        prompt = tuple((row + at) % vocab_size for at in range(PROMPT_TOKENS + row * EVERY // ROWS))
        asked = GenerationRequest(
            prompt=prompt, sampling=Sampling(seed=row), max_tokens=_ENDLESS, ignore_eos=True, checkpoint=new_state_id()
        )
        streams.append(TimedStream((await model.engine.open([asked], ""))[0]))
    reading = [asyncio.create_task(stream.read(EVERY_S)) for stream in streams]

    async def end() -> None:
        for stream in streams:
            stream.run.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    stack.push_async_callback(end)
    for stream in streams:
        await stream.after(0.0)
    return streams


async def _stretch(streams: list[TimedStream], seconds: float) -> Stretch:
    before, started, cpu = _tokens(streams), time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    tokens, elapsed, used = _tokens(streams) - before, time.perf_counter() - started, time.process_time() - cpu
    return Stretch(tokens / elapsed, 1e6 * used / tokens)


def _tokens(streams: list[TimedStream]) -> int:
    return sum(stream.run.usage.completion_tokens for stream in streams)
