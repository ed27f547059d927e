"""Measures, without HTTP, the time to the first token of two long prompts: one whose state another engine has stored, and a new one."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.errors import LoadtestError
from service.catalog import Catalog
from service.generation.request import GenerationRequest, Sampling
from service.settings import Settings

REPEATS = 8


@dataclass(frozen=True)
class Prefix:
    """Median milliseconds to the first token. `read`: the prompt's state is read from the store. `fed`: the whole prompt is fed."""

    read: float
    fed: float


def from_store(bundle: Path, folder: Path, sizes: Sequence[int], seed: int) -> dict[int, Prefix]:
    """Measure prompts of the lengths `sizes` in tokens. Two engines of the bundle share the store in `folder`, like two generators in the
    deployment profile split."""

    async def measured() -> dict[int, Prefix]:
        given = {"bundles": [str(bundle)], "states": str(folder), "profile": "split", "slots": 4}
        async with AsyncExitStack() as stack:
            catalogs = [Catalog(Settings.model_validate(given)) for _ in range(2)]
            for catalog in catalogs:
                await asyncio.to_thread(catalog.load)
                catalog.start()
                stack.push_async_callback(catalog.stop)
            return await _measured(catalogs[0], catalogs[1], sizes, np.random.default_rng(seed))

    return asyncio.run(measured())


async def _measured(here: Catalog, there: Catalog, sizes: Sequence[int], seeded: np.random.Generator) -> dict[int, Prefix]:
    vocab_size = here.generator(None).manifest.limits.vocab_size
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for size in list(sizes) * REPEATS:
        known, new = (tuple(seeded.integers(0, vocab_size, size).tolist()) for _ in range(2))
        await _first_token(here, known, cached=0)
        assert here.states is not None
        await here.states.call(lambda engine: None)  # waits until the state is written
        found[size].append((await _first_token(there, known, cached=size), await _first_token(there, new, cached=0)))
    return {size: Prefix(*(statistics.median(times) for times in zip(*each, strict=True))) for size, each in found.items()}


async def _first_token(catalog: Catalog, prompt: tuple[int, ...], cached: int) -> float:
    started = time.perf_counter()
    asked = GenerationRequest(prompt=prompt, sampling=Sampling(seed=0), max_tokens=1, ignore_eos=True)
    (run,) = await catalog.generator(None).engine.open([asked], "")
    async for _ in run:
        pass
    if run.usage.cached_tokens != cached:
        raise LoadtestError(f"{run.usage.cached_tokens} tokens of a prompt were found, and {cached} were expected")
    return 1000 * (time.perf_counter() - started)
