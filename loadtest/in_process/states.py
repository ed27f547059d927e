"""Measures how soon the engine gives the first token after a stored or forked state, and after a prompt that is fed in full, without HTTP.

All times are in milliseconds. The prefix cache and the in-memory cache of recently used states are off, so every state is read from the
store.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.errors import LoadtestError
from loadtest.in_process.stores import ROOM, new_record
from service.catalog import Catalog
from service.generation.request import GenerationRequest, Sampling
from service.settings import Settings
from service.states.engine import StateEngine
from service.states.record import Keep, StateRecord, StateReference

LONG = 10_000  # length in tokens of the prompt that is fed in full
REPEATS = 30


@dataclass(frozen=True)
class Restored:
    """Median times in milliseconds for a stored state of one context length.

    `first_token`: from the request to the first token, if the run starts from the stored state. `after_one`: the same, if one new prompt
    token is fed first. `from_fork`: the same as `first_token`, if the run starts from a new fork of the state. `fork`: making this fork.
    `read`: reading the state from the store, without a run.
    """

    first_token: float
    after_one: float
    from_fork: float
    fork: float
    read: float


@dataclass(frozen=True)
class EngineFigures:
    """Times of a decoder's engine in milliseconds.

    `restored`: context length in tokens -> times with a stored state. `again`: from the request to the first token, if a prompt of `LONG`
    tokens is fed in full. `step`: one decode step of a single run.
    """

    restored: dict[int, Restored] = field(default_factory=dict)
    again: float = 0.0
    step: float = 0.0


def in_engine(bundle: Path, folder: Path, contexts: Sequence[int], seed: int) -> EngineFigures:
    """Measure a decoder's engine with a store in `folder`, for a stored state of each length in `contexts` (in tokens)."""

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

    states = {}
    for context in contexts:
        record = states[context] = new_record(model.name, model.manifest.fingerprint)
        (run,) = await model.engine.open([asked(context, max_tokens=0, keep=Keep(record=record, quota=ROOM))], "")
        async for _ in run:
            pass
    found: dict[int, list[Restored]] = {context: [] for context in contexts}
    for context, record in list(states.items()) * REPEATS:  # in turns, so that a slow second of the machine slows all contexts
        start, fork = StateReference("", record.id), new_record(model.name, model.manifest.fingerprint)
        child = replace(fork, parent=record.id, origin="fork", numerics=run.numerics)
        forked = await _waited(store.call(partial(_fork, child=child)))
        each = Restored(
            first_token=await first_token(0, start=start),
            after_one=await first_token(1, start=start),
            from_fork=await first_token(0, start=StateReference("", child.id)),
            fork=forked,
            read=await _waited(store.call(partial(_read, state=record.id))),
        )
        found[context].append(each)
    restored = {context: _medians(each) for context, each in found.items()}
    again = statistics.median([await first_token(LONG) for _ in range(3)])
    (run,) = await model.engine.open([asked(8, max_tokens=2_000)], "")
    started = time.perf_counter()
    tokens = sum([len(delta.token_ids) async for delta in run])
    return EngineFigures(restored, again, 1000 * (time.perf_counter() - started) / tokens)


def _medians(each: Sequence[Restored]) -> Restored:
    return Restored(**{name: statistics.median(getattr(one, name) for one in each) for name in Restored.__dataclass_fields__})


def _read(engine: StateEngine, state: str) -> bytes:
    return engine.blob("", state)


def _fork(engine: StateEngine, child: StateRecord) -> StateRecord:
    return engine.put(child, None, quota=ROOM)


async def _waited(awaited: Awaitable[object]) -> float:
    started = time.perf_counter()
    await awaited
    return 1000 * (time.perf_counter() - started)
