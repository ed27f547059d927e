"""An encoder-decoder of a pool, its engine real and its steps held: who leaves, who waits, what breaks, as a gateway sees it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import torch

from models.encoder_decoder.search import attended
from service.catalog import Catalog
from service.encoder_decoder.engine import EncoderDecoderEngine
from service.errors import DeadlineExceeded, NotReady, Overloaded, RuntimeFailed
from service.generation.admission import QueueLimits
from service.generation.model import Generating, Generator
from service.pools import wire
from service.pools.client import PoolGenerator
from service.pools.host import Host
from service.pools.replicas import ReplicaLost, Replicas
from service.settings import Settings
from tests.encoder_decoders import random_encoder_decoder
from tests.service.encoder_decoder.test_engine import asked, cut, tensors, written
from tests.service.encoder_decoder.torch_session import TorchSession
from tests.service.fakes import PATIENCE_S, set_forward, until
from tests.service.pools.test_client import Mortal


class Replica(Catalog):
    """What a replica has: one encoder-decoder, its steps of torch."""

    def __init__(self, bundle: Path, **limits: int) -> None:
        super().__init__(Settings(bundles=(bundle,), threads=1, stream_interval_s=0))
        self.session = TorchSession(random_encoder_decoder())
        self._limits = QueueLimits(max_wait_s=PATIENCE_S, **limits)

    def open_encoder_decoder(self, model: Generator) -> Generating:
        return EncoderDecoderEngine(self.session, model.vocabulary, limits=self._limits, metrics=model.metrics)

    @property
    def jobs(self) -> list[object]:
        """What is still wanted of what has rows."""
        return [job for job in self.models["tiny-writer"].engine._batch.sources if not all(run.cancelled for run in job.runs)]  # type: ignore[union-attr]


Writing = Callable[..., AbstractAsyncContextManager[tuple[PoolGenerator, Mortal, Replica]]]


@pytest.fixture
def writing(encoder_decoder_bundle: Path) -> Writing:
    @asynccontextmanager
    async def made(**limits: int) -> AsyncIterator[tuple[PoolGenerator, Mortal, Replica]]:
        """The gateway's engine, the way there, and what is behind it."""
        replica = Replica(encoder_decoder_bundle, **limits)
        pool = Mortal(Host(replica))
        replicas = Replicas(pool)
        await pool.host.start()
        await replicas.connect()
        await replicas.stop()  # its heartbeat
        try:
            yield PoolGenerator(replicas, "tiny-writer", replicas.described["tiny-writer"]["fingerprint"]), pool, replica
        finally:
            replica.session.open()
            await replica.stop()

    return made


async def stepping(replica: Replica) -> None:
    """Until a step has come to the gate."""
    assert await asyncio.to_thread(replica.session.arrived.wait, PATIENCE_S)


async def test_the_runs_of_several_sources_come_with_their_attention(writing: Writing) -> None:
    async with writing() as (engine, _, replica):
        runs = await engine.open([asked("forty-two", attention=True), asked("x", beams=3, n=2)], "key")
        assert [len(run.request.prompt) for run in runs] == [9, 1, 1]
        first, second, third = await asyncio.gather(*map(written, runs))
    tokens, weights = attended(replica.session.model, *tensors("forty-two"))
    assert first == cut(tokens[0].tolist())
    assert second != third
    attention = runs[0].attention
    assert attention is not None
    assert list(attention.token_ids) == first
    torch.testing.assert_close(torch.from_numpy(attention.weights.copy()), weights[0, : len(first)], atol=1e-4, rtol=0)
    assert runs[1].attention is None, "it was not asked for"


async def test_who_leaves_all_runs_of_a_request_gives_its_rows_back(writing: Writing) -> None:
    async with writing(slots=2) as (engine, _, replica):
        replica.session.hold()
        runs = await engine.open([asked("a thousand and one", beams=2, n=2)], "key")
        await stepping(replica)
        runs[0].cancel()
        (waits,) = await engine.open([asked("x")], "key")
        assert replica.jobs, "the other output is still wanted"
        assert replica.models["tiny-writer"].engine.pending == 3
        runs[1].cancel()
        await until(lambda: not replica.jobs)
        replica.session.open()
        expected, _ = attended(replica.session.model, *tensors("x"))
        assert await written(waits) == cut(expected[0].tolist())
        assert [N for _, N in replica.session.sizes] == [len("a thousand and one"), *[1] * len(cut(expected[0].tolist()))]


async def test_a_deadline_ends_what_is_written_and_what_waits(writing: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    async with writing(slots=1) as (engine, _, replica):
        replica.session.hold()
        deadline = time.monotonic() + PATIENCE_S
        # Seconds that remain are sent, so a slow way there makes the replica's deadline later. Here both have one clock.
        monkeypatch.setattr(wire, "deadline_in", lambda left_s: deadline)
        runs = [(await engine.open([asked(deadline=deadline)], "key"))[0] for _ in range(2)]
        await stepping(replica)
        set_forward(monkeypatch)(PATIENCE_S)
        replica.session.open()
        assert len(await written(runs[0])) == 1
        with pytest.raises(DeadlineExceeded):
            await written(runs[1])


async def test_a_replica_that_is_full_says_so(writing: Writing) -> None:
    async with writing(slots=1, max_waiting=1) as (engine, _, replica):
        replica.session.hold()
        runs = [*(await engine.open([asked()], "key"))]
        await stepping(replica)
        runs += await engine.open([asked()], "key")
        with pytest.raises(Overloaded, match="1 sources wait, and the most is 1") as refused:
            await engine.open([asked()], "key")
        assert refused.value.retry_after_s > 0
        replica.session.open()
        assert all(await asyncio.gather(*map(written, runs)))


async def test_a_step_that_fails_is_told_and_the_model_recovers(writing: Writing) -> None:
    async with writing() as (engine, pool, replica):
        replica.session.error = RuntimeError("no memory")
        (run,) = await engine.open([asked()], "key")
        with pytest.raises(RuntimeFailed):
            await written(run)
        assert [healthy for *_, healthy, _, _ in await pool.host.heartbeat()] == [False]
        replica.session.error = None
        assert [healthy for *_, healthy, _, _ in await pool.host.heartbeat()] == [True]
        assert await written((await engine.open([asked()], "key"))[0])


async def test_a_replica_that_stops_tells_whom_it_has_accepted(writing: Writing) -> None:
    async with writing(slots=1) as (engine, _, replica):
        replica.session.hold()
        runs = [(await engine.open([asked()], "key"))[0] for _ in range(2)]
        await stepping(replica)
        stopping = asyncio.create_task(replica.stop())
        await until(lambda: replica.models["tiny-writer"].engine._admission._closed)  # type: ignore[union-attr]
        replica.session.open()
        await stopping
        for run in runs:
            with pytest.raises(NotReady, match="shutting down"):
                await written(run)


@pytest.mark.parametrize(("after", "asked_for"), [(0, 2), (1, 1)])
async def test_a_lost_replica_is_asked_once_more_unless_it_had_accepted(writing: Writing, after: int, asked_for: int) -> None:
    async with writing() as (engine, pool, _):
        pool.deaths, pool.after_messages = {"generate": 1}, after
        (run,) = await engine.open([asked()], "key")
        if after:
            with pytest.raises(ReplicaLost):
                await written(run)
        else:
            assert await written(run)
        assert pool.asked.count("generate") == asked_for
