"""Runs whose generator is lost in their middle: a gateway opens them on another one, and their reader sees the undisturbed text."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from service.call import Call
from service.catalog import Catalog
from service.errors import NotReady
from service.generation.request import Delta, GenerationRequest, Grammar, Sampling
from service.generation.run import join
from service.generation.runs import Runs
from service.pools.catalog import GatewayCatalog
from service.pools.host import Host
from service.pools.replicas import ReplicaLost
from service.settings import Settings
from tests.service.fakes import PATIENCE_S, until
from tests.service.pool_fakes import Loopback

RANDOM = Sampling(seed=7, temperature=1.0, top_k=60, repetition_penalty=1.2, frequency_penalty=0.2)


class Dying(Loopback):
    """Two generators. Each stream is lost after as many messages as the list has next; without a number it lives."""

    def __init__(self, host: Host) -> None:
        super().__init__(host, ("one", "other"))
        self.lives: list[int] = []
        self.opened = 0
        self.unready = 0  # so many requests find no generator
        self.unready_after = 0  # the same, after the next loss

    async def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        self.opened += 1
        if self.unready:
            self.unready -= 1
            raise NotReady("no replica answers")
        left = self.lives.pop(0) if self.lives else -1
        async for message in super().stream(replica, method, *arguments):
            if not left:
                self.unready, self.unready_after = self.unready_after, 0
                raise ReplicaLost("gone")
            left -= 1
            yield message


Pool = TypeVar("Pool", bound=Loopback)


@asynccontextmanager
async def gateway(bundle: Path, kind: Callable[[Host], Pool] = Dying) -> AsyncIterator[tuple[GatewayCatalog, Pool]]:  # type: ignore[assignment]
    behind = Catalog(Settings(bundles=(bundle,), threads=1, stream_interval_s=0, slots=8))
    pool = kind(Host(behind))
    await pool.host.start()
    catalog = GatewayCatalog(behind.settings, encoders=None, generators=pool)
    await catalog.connect()
    await asyncio.to_thread(catalog.load)
    try:
        yield catalog, pool
    finally:
        await catalog.stop()
        await behind.stop()


async def read(catalog: GatewayCatalog, requests: Sequence[GenerationRequest], timeout_s: float = 1.0) -> tuple[list[Delta], Runs]:
    """Stream the runs as a dialect does. A wait for new tokens ends after `timeout_s`."""
    model = catalog.generator(None)
    await model.engine.probe(0.0)  # finds lost generators well again
    runs = await Runs.submit(model, requests, Call("id", 0.0), n=len(requests), prompt_field="prompt", stream=True)
    made: list[list[Delta]] = [[] for _ in requests]
    async with asyncio.timeout(PATIENCE_S):
        while not runs.done:
            for at, delta in await runs.take(timeout_s):
                made[at].append(delta)
    runs.close()
    return [join(deltas) for deltas in made], runs


HARD = {
    "plain": GenerationRequest(prompt=(65, 66), sampling=RANDOM, max_tokens=24),
    "logprobs": GenerationRequest(prompt=(65,), sampling=RANDOM, max_tokens=24, top_logprobs=2, prompt_logprobs=0),
    "stop": GenerationRequest(prompt=(65,), sampling=RANDOM, max_tokens=60, stop=("e", "zz"), min_tokens=12),
    "grammar": GenerationRequest(prompt=(65,), sampling=RANDOM, max_tokens=60, grammar=Grammar(kind="regex", source="([a-z]{3} ){5}")),
}


@pytest.mark.parametrize("hard", HARD)
async def test_runs_that_lose_their_generator_again_and_again_are_the_undisturbed_ones(decoder_bundle: Path, hard: str) -> None:
    requests = [replace(HARD[hard], sampling=replace(RANDOM, seed=seed)) for seed in range(3)]
    seeded, opened, rounds = random.Random(hard), 0, 6
    least = 5 if hard == "logprobs" else 2  # messages: those of the prompt's log-probabilities come before the first token
    async with gateway(decoder_bundle) as (catalog, pool):
        plain, whole = await read(catalog, requests)
        for _ in range(rounds):
            pool.opened, pool.lives = 0, [1, *(seeded.randrange(least, least + 4) for _ in range(4))]  # the first one makes no token
            disturbed, runs = await read(catalog, requests)
            opened += pool.opened
            assert disturbed == plain
            assert (runs.prompt_tokens, runs.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)
            for run, undisturbed in zip(runs.runs, whole.runs, strict=True):
                assert list(run.prompt_logprobs) == list(undisturbed.prompt_logprobs)
        assert opened > rounds, "runs were opened again"


async def test_a_request_that_ends_every_generator_is_not_sent_for_ever(decoder_bundle: Path) -> None:
    async with gateway(decoder_bundle) as (catalog, pool):
        pool.lives = [1] * 50
        with pytest.raises(ReplicaLost):
            await read(catalog, [HARD["plain"]])
        assert 1 < pool.opened <= 3


@pytest.mark.parametrize("timeout_s", [1.0, 0.001], ids=["one wait", "many waits"])
async def test_a_run_waits_for_the_generator_that_is_started_again(decoder_bundle: Path, timeout_s: float) -> None:
    async with gateway(decoder_bundle) as (catalog, pool):
        (plain,), _ = await read(catalog, [HARD["plain"]])
        pool.lives, pool.opened = [4], 0

        pool.unready_after = 5
        (disturbed,), _ = await read(catalog, [HARD["plain"]], timeout_s)
    assert disturbed == plain
    assert pool.opened == 1 + 5 + 1, "the lost stream, the attempts without a generator, and one that goes on"


async def test_a_reader_that_leaves_while_runs_are_opened_again_leaves_nothing(decoder_bundle: Path) -> None:
    async with gateway(decoder_bundle) as (catalog, pool):
        pool.lives, model = [3], catalog.generator(None)
        runs = await Runs.submit(
            model, [replace(HARD["plain"], max_tokens=10_000)], Call("id", 0.0), n=1, prompt_field="prompt", stream=True
        )
        async with asyncio.timeout(PATIENCE_S):
            while pool.lives or await runs.take(1.0):
                pass
        runs.close()
        await until(lambda: not pool.host.catalog.generators[model.name].engine.pending)


async def test_generators_of_another_arithmetic_do_not_go_on_with_a_run(decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(decoder_bundle) as (catalog, pool):
        engine = pool.host.catalog.generators[catalog.generator(None).name].engine
        (run,) = await engine.open([replace(HARD["plain"], known=(70,), numerics=engine.numerics)], "")
        run.cancel()
        with pytest.raises(NotReady, match="another arithmetic"):
            await engine.open([replace(HARD["plain"], known=(70,), numerics="of another machine")], "")
