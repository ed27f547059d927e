"""Measures states in the engine and in a store, without HTTP. All times are in milliseconds.

The prefix cache and the memory of states that were used last are off: every state is read from the store.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from loadtest.errors import LoadtestError
from service.catalog import Catalog
from service.generation.request import GenerationRequest, Sampling
from service.settings import Settings
from service.states.engine import StateEngine
from service.states.opening import open_engine
from service.states.record import Filter, Keep, Quota, StateRecord, StateReference, new_state_id

LONG = 10_000  # tokens of the prompt that is fed again
REPEATS = 30
WRITES = 200
_LIFE_S = 0.5  # of the states that expire
_ROOM = Quota(states=2**31, size=2**62)


@dataclass(frozen=True)
class Restored:
    """Medians for a state of one context: restored and drawn from, the same after one new token, and the store's read alone."""

    first_token: float
    after_one: float
    read: float


@dataclass(frozen=True)
class EngineFigures:
    """`restored` by context in tokens; a prompt of `LONG` tokens fed again, to its first token; a decode step of one run."""

    restored: dict[int, Restored] = field(default_factory=dict)
    again: float = 0.0
    step: float = 0.0


def in_engine(bundle: Path, folder: Path, contexts: Sequence[int], seed: int) -> EngineFigures:
    """Measure a decoder's engine with a store in `folder`."""

    async def measured() -> EngineFigures:
        given = {"bundles": [str(bundle)], "states": str(folder), "prefix_cache_bytes": 0, "hot_state_bytes": 0}
        catalog = Catalog(Settings.model_validate(given))
        await asyncio.to_thread(catalog.load)
        catalog.start()
        try:
            return await _measured(catalog, contexts, np.random.default_rng(seed))
        finally:
            await catalog.stop()

    return asyncio.run(measured())


async def _measured(catalog: Catalog, contexts: Sequence[int], seeded: np.random.Generator) -> EngineFigures:
    model, store = catalog.generator(None), catalog.states
    assert store is not None
    vocab_size = model.manifest.limits.vocab_size

    def asked(tokens: int, **options: Any) -> GenerationRequest:
        prompt = tuple(seeded.integers(0, vocab_size, tokens).tolist())
        return GenerationRequest(**{"prompt": prompt, "sampling": Sampling(seed=0), "max_tokens": 1, "ignore_eos": True, **options})

    async def first_token(tokens: int, **options: Any) -> float:
        request = asked(tokens, **options)

        async def wait() -> None:
            (run,) = await model.engine.open([request], "")
            if not [delta async for delta in run if delta.token_ids]:
                raise LoadtestError("a run has ended without a token")

        return await _waited(wait())

    restored = {}
    for context in contexts:
        record = _record(model.name, model.manifest.fingerprint)
        (run,) = await model.engine.open([asked(context, max_tokens=0, keep=Keep(record=record, quota=_ROOM))], "")
        async for _ in run:
            pass
        start = StateReference("", record.id)
        restored[context] = Restored(
            statistics.median([await first_token(0, start=start) for _ in range(REPEATS)]),
            statistics.median([await first_token(1, start=start) for _ in range(REPEATS)]),
            statistics.median([await _waited(store.call(partial(_read, state=record.id))) for _ in range(REPEATS)]),
        )
    again = statistics.median([await first_token(LONG) for _ in range(3)])
    (run,) = await model.engine.open([asked(8, max_tokens=2_000)], "")
    started = time.perf_counter()
    tokens = sum([len(delta.token_ids) async for delta in run])
    return EngineFigures(restored, again, 1000 * (time.perf_counter() - started) / tokens)


def _read(engine: StateEngine, state: str) -> bytes:
    return engine.blob("", state)


async def _waited(awaited: Awaitable[object]) -> float:
    started = time.perf_counter()
    await awaited
    return 1000 * (time.perf_counter() - started)


# Stores ----------------------------------------------------------------------------------------------------------------------------------


def turns(location: str, blob: bytes) -> dict[str, dict[str, float]]:
    """Measure stored turns of these bytes, one at a time. Returns p50 and p99 of a write and of a read."""
    with _opened(location) as engine:
        records = [_record("bench", "f") for _ in range(WRITES)]
        blobs = [blob[:-8] + number.to_bytes(8, "little") for number in range(WRITES)]
        writes = [_took(partial(engine.put, record, each, quota=_ROOM)) for record, each in zip(records, blobs, strict=True)]
        reads = [_took(partial(engine.blob, "", record.id)) for record in records]
        for record in records:
            engine.delete("", record.id)
    cuts = {"write": statistics.quantiles(writes, n=100), "read": statistics.quantiles(reads, n=100)}
    return {what: {"p50": each[49], "p99": each[98]} for what, each in cuts.items()}


def many_states(location: str, many: int) -> tuple[dict[str, float], float]:
    """Store and expire many states, and fork, list and delete many of one parent. Returns the median of each kind of call, by kind, and
    the MiB that this process has grown by."""
    process = psutil.Process()
    with _opened(location) as engine:
        before = process.memory_info().rss
        parent = engine.put(_record("bench", "f"), b"the only blob", quota=_ROOM)

        def store() -> None:
            record = replace(_record("bench", "f"), expires=time.time() + _LIFE_S)
            engine.put(record, record.id.encode(), quota=_ROOM)

        def fork() -> None:
            engine.put(replace(_record("bench", "f"), parent=parent.id, origin="fork"), None, quota=_ROOM)

        took = {"stored": [_took(store) for _ in range(many)]}
        time.sleep(_LIFE_S)
        took["expired"] = [_took(engine.sweep) / many]
        took["forked from one parent"] = [_took(fork) for _ in range(many)]
        took["listed, a page of 100"] = [_took(partial(engine.page, "", Filter(limit=100))) for _ in range(100)]
        memory = process.memory_info().rss - before
        forks = engine.children("", parent.id, many)
        took["deleted"] = [_took(partial(engine.delete, "", each.id)) for each in (*forks, parent)]
    return {what: statistics.median(times) for what, times in took.items()}, memory / 2**20


@contextmanager
def _opened(location: str) -> Iterator[StateEngine]:
    engine = open_engine(location)
    try:
        yield engine
    finally:
        engine.close()


def _record(model: str, fingerprint: str) -> StateRecord:
    now = time.time()
    return StateRecord(
        id=new_state_id(),
        tenant="",
        model=model,
        fingerprint=fingerprint,
        numerics="0",
        position=1,
        parent=None,
        origin="prompt",
        created=now,
        used=now,
    )


def _took(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)
