"""The engine alone: `rows` runs that never end, drawn at temperature 1, read by the loop that it serves. No HTTP."""

import asyncio
import itertools
import time
from pathlib import Path

from export import contract
from loadtest.generation.steps import open_steps
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.grammar import Grammars
from service.generation.request import GenerationRequest, Sampling
from service.generation.run import Run
from service.generation.text import Vocabulary
from service.metrics import GeneratorMetrics, Metrics

PROMPT_TOKENS = 8
_ENDLESS = 10_000_000


def tokens_per_s(bundle: Path, rows: int, seconds: float, threads: int) -> float:
    """Of all runs together, once each of them has begun."""
    return asyncio.run(_tokens_per_s(bundle, rows, seconds, threads))


async def _tokens_per_s(bundle: Path, rows: int, seconds: float, threads: int) -> float:
    session = open_steps(bundle, threads)
    file = bundle / contract.TOKENIZER
    engine = GeneratorEngine(
        session,
        Vocabulary(file),
        eos_token_ids=session.decoder.eos_token_ids,
        grammars=Grammars(file, ()),
        limits=GeneratorLimits(slots=rows),
        metrics=GeneratorMetrics(Metrics(), "bench"),
    )
    engine.start()
    seeds = itertools.count()
    runs = [engine.submit(_endless(session.vocab_size, next(seeds))) for _ in range(rows)]
    begun = asyncio.Semaphore(0)
    readers = [asyncio.create_task(_read(run, begun)) for run in runs]
    try:
        for _ in runs:
            await begun.acquire()
        before, started = sum(run.usage.completion_tokens for run in runs), time.perf_counter()
        await asyncio.sleep(seconds)
        after, elapsed = sum(run.usage.completion_tokens for run in runs), time.perf_counter() - started
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*readers)
        await engine.stop()
    return (after - before) / elapsed


def _endless(vocab_size: int, seed: int) -> GenerationRequest:
    prompt = tuple((seed + at) % vocab_size for at in range(PROMPT_TOKENS))
    return GenerationRequest(prompt=prompt, sampling=Sampling(seed=seed), max_tokens=_ENDLESS, ignore_eos=True)


async def _read(run: Run, begun: asyncio.Semaphore) -> None:
    await anext(run)
    begun.release()
    async for _ in run:
        pass
