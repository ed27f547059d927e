"""What a gateway does when replicas are lost, silent or of another version."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.contract import BundleError
from service.call import Call
from service.encoding.engine import EncoderEngine
from service.encoding.request import EncodeRequest
from service.errors import DeadlineExceeded, NotReady, QueueTooLong, ServiceError
from service.generation.request import GenerationRequest, Sampling
from service.pools import catalog as catalogs
from service.pools.catalog import GatewayCatalog
from service.pools.client import PoolEncoder
from service.pools.generators import PoolGenerator
from service.pools.host import Host
from service.pools.replicas import ReplicaLost, Replicas
from service.settings import Settings
from tests.service.fakes import PATIENCE_S, FakeCatalog, fake_bundle, fake_catalog, until
from tests.service.generation_fakes import FakeGenerator, FakeGeneratorCatalog
from tests.service.pool_fakes import Loopback, gateway_of_encoder, stop
from tests.service.scripted_engine import ScriptedEngine

REQUEST = GenerationRequest(prompt=(1, 2), sampling=Sampling(seed=0), max_tokens=5)


class Mortal(Loopback):
    """Dies so many times: of each method, before it has answered, or after so many messages."""

    def __init__(self, host: Host) -> None:
        super().__init__(host, ("one", "other"))
        self.deaths: dict[str, int] = {}
        self.after_messages = 0
        self.asked: list[str] = []

    def _dies(self, method: str) -> bool:
        self.asked.append(method)
        self.deaths[method] = self.deaths.get(method, 0) - 1
        return self.deaths[method] >= 0

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        if self._dies(method):
            raise ReplicaLost("gone")
        return await super().call(replica, method, *arguments)

    async def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        left = self.after_messages if self._dies(method) else -1
        async for message in super().stream(replica, method, *arguments):
            if not left:
                raise ReplicaLost("gone")
            left -= 1
            yield message


async def encoding(folder: Path) -> tuple[GatewayCatalog, Mortal]:
    """A gateway that is ready, and its pool."""
    return await gateway_of_encoder(folder, Mortal)


async def test_what_an_encoder_took_with_it_is_asked_for_once_more(tmp_path: Path) -> None:
    gateway, pool = await encoding(tmp_path)
    expected = (await gateway.get("mini").answer(EncodeRequest(inputs=["cat"]), Call("a", 0.0))).rows[0]
    pool.deaths = {"encode": 1}
    row = (await gateway.get("mini").answer(EncodeRequest(inputs=["cat"]), Call("a", 0.0))).rows[0]
    assert not isinstance(row, ServiceError)
    assert not isinstance(expected, ServiceError)
    assert np.array_equal(row[0], expected[0])
    await gateway.get("mini").engine.probe([], "", 0.0)  # which finds the lost one well again
    pool.deaths = {"encode": 2}
    with pytest.raises(NotReady, match="gone"):
        await gateway.get("mini").answer(EncodeRequest(inputs=["cat"]), Call("a", 0.0))
    await stop(gateway, pool)


async def test_a_row_that_came_before_its_replica_was_lost_comes_once(tmp_path: Path) -> None:
    gateway, pool = await encoding(tmp_path)
    pool.deaths, pool.after_messages = {"encode_by_row": 1}, 1
    texts, came = ["cat", "dog " * 60, "fish " * 60], []
    answer = await gateway.get("mini").answer(EncodeRequest(inputs=texts), Call("a", 0.0), lambda at, row: came.append(at))
    assert sorted(came) == [0, 1, 2]
    assert len(answer.rows) == 3
    assert pool.asked.count("encode_by_row") == 2
    await stop(gateway, pool)


@pytest.mark.parametrize("by_row", [False, True])
async def test_what_a_caller_has_left_is_not_computed_in_the_replicas(by_row: bool, tmp_path: Path) -> None:
    """All parts of it, in whichever replicas they wait."""
    gateway, pool = await encoding(tmp_path)
    behind = pool.host.catalog
    assert isinstance(behind, FakeCatalog)
    session = behind.session("mini")
    session.hold()
    first = asyncio.create_task(gateway.get("mini").answer(EncodeRequest(inputs=["cat"]), Call("a", 0.0)))
    await session.entered(1)
    texts = [f"dog {number}" for number in range(150)]
    left = asyncio.create_task(
        gateway.get("mini").answer(EncodeRequest(inputs=texts), Call("b", 0.0), (lambda at, row: None) if by_row else None)
    )
    await until(lambda: pool.asked.count("encode_by_row" if by_row else "encode") == 3 + (not by_row))
    await until(lambda: session.active == behind.computing("mini").limits.concurrent_runs)
    begun = sum(map(len, session.batches))
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    for _ in range(50):  # turns of the loop in which it gets there
        await asyncio.sleep(0)
    session.open()
    assert (await first).rows
    assert (await gateway.get("mini").answer(EncodeRequest(inputs=["bird"]), Call("c", 0.0))).rows
    assert sum(map(len, session.batches)) == begun + 1
    await stop(gateway, pool)


class Refusing(Mortal):
    """Refuses encodes by turns, as told."""

    refusals: list[bool]
    refusers: list[str]
    answerers: list[str]
    refusing_s, retry_after_s = 0.0, 0.001

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        if method == "encode" and self.refusals and self.refusals.pop(0):
            self.asked.append("refused")
            self.refusers.append(replica)
            await asyncio.sleep(self.refusing_s)
            raise QueueTooLong("full", retry_after_s=self.retry_after_s)
        if method == "encode":
            self.answerers.append(replica)
        return await super().call(replica, method, *arguments)


async def refusing(folder: Path, *refusals: bool) -> tuple[GatewayCatalog, Refusing]:
    gateway, pool = await encoding(folder)
    pool.__class__ = Refusing
    assert isinstance(pool, Refusing)
    pool.refusals, pool.refusers, pool.answerers = list(refusals), [], []
    return gateway, pool


async def test_parts_of_a_request_that_was_begun_are_asked_for_again_when_they_are_refused(tmp_path: Path) -> None:
    """Its own parts are the queue before them; so a request of any size is taken by an idle pool."""
    gateway, pool = await refusing(tmp_path, False, True, True, True, True, True, True, False, True, True)
    answer = await gateway.get("mini").answer(EncodeRequest(inputs=[f"cat {n}" for n in range(150)]), Call("a", 0.0))
    assert len(answer.rows) == 150
    assert pool.asked.count("encode") == 3
    assert pool.asked.count("refused") == 8
    assert not gateway._replicas["encoder"].refused, "the request was not refused"
    await stop(gateway, pool)


async def test_what_one_replica_refuses_another_one_does(tmp_path: Path) -> None:
    """And the next request is asked for too: one full replica is not a full pool."""
    gateway, pool = await refusing(tmp_path, True, False, True, False)
    for number in range(2):
        assert (await gateway.get("mini").answer(EncodeRequest(inputs=[f"cat {number}"]), Call("a", 0.0))).rows
    assert pool.refusers[0] != pool.answerers[0]
    assert (pool.asked.count("refused"), pool.asked.count("encode")) == (2, 2)
    assert not gateway._replicas["encoder"].refused
    await stop(gateway, pool)


async def test_a_refusal_is_not_tried_elsewhere_after_the_deadline(tmp_path: Path) -> None:
    gateway, pool = await refusing(tmp_path, *[True] * 4)
    pool.refusing_s = 0.05
    with pytest.raises(DeadlineExceeded):
        await gateway.get("mini").answer(EncodeRequest(inputs=["cat"]), Call("a", 0.0, deadline=time.monotonic() + 0.02))
    assert pool.asked.count("encode") == 0
    await stop(gateway, pool)


async def test_what_no_replica_took_is_told_to_one_of_them_once(tmp_path: Path) -> None:
    """Its tokens; the pool's scaling needs them."""
    gateway, pool = await refusing(tmp_path, *[True] * 3)
    pool.retry_after_s = 0.0
    text = "cat " * 10
    with pytest.raises(QueueTooLong):
        await gateway.get("mini").answer(EncodeRequest(inputs=[text]), Call("a", 0.0, content=1))
    engine, behind = gateway.get("mini").engine, pool.host.catalog.get("mini").engine
    assert isinstance(engine, PoolEncoder)
    assert isinstance(behind, EncoderEngine)
    tokens = gateway._replicas["encoder"].refused["mini"]
    assert tokens > 10
    before_s = behind.offered._total_s
    for _ in range(2):
        await engine.probe([], "", 0.0)
        assert behind.offered._total_s - before_s == pytest.approx(tokens / behind.tokens_per_s)
    pool.refusals = [True] * 3
    with pytest.raises(QueueTooLong):
        await gateway.get("mini").answer(EncodeRequest(inputs=[text]), Call("a", 0.0, content=1))
    assert gateway._replicas["encoder"].refused["mini"] == 0, "the same request is counted once"
    for _ in range(2):
        await gateway.get("mini").answer(EncodeRequest(inputs=[text]), Call("a", 0.0, content=1))
    assert gateway._replicas["encoder"].refused["mini"] == -tokens, "and the replica that admits it counts it too"
    await stop(gateway, pool)


async def test_a_refused_request_that_is_sent_again_at_once_is_not_asked_of_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are, because each that a replica refuses gets a place there."""
    gateway, pool = await refusing(tmp_path, *[True] * 3)
    pool.retry_after_s = 3600.0
    monkeypatch.setattr("service.overload.refusals._REPEATED_S", 3600.0)
    with pytest.raises(QueueTooLong, match="full"):
        await gateway.get("mini").answer(EncodeRequest(inputs=["cat"]), Call("a", 0.0, content=1))
    asked = len(pool.asked)
    with pytest.raises(QueueTooLong, match="just refused") as again:
        await gateway.get("mini").answer(EncodeRequest(inputs=["cat"]), Call("a", 0.0, content=1))
    assert 3000 < again.value.retry_after_s <= 3600
    assert len(pool.asked) == asked
    assert (await gateway.get("mini").answer(EncodeRequest(inputs=["cat"]), Call("a", 0.0, content=2))).rows
    monkeypatch.setattr("service.overload.refusals._REPEATED_S", 0.0)
    assert (await gateway.get("mini").answer(EncodeRequest(inputs=["cat"]), Call("a", 0.0, content=1))).rows
    await stop(gateway, pool)


async def test_replicas_of_another_bundle_stop_the_gateways_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogs, "_EXCHANGE_S", 0.0)
    behind = fake_catalog(fake_bundle(tmp_path / "old" / "mini"))
    host = Host(behind)
    await host.start()
    other = fake_bundle(tmp_path / "new" / "mini", max_tokens=32)
    gateway = GatewayCatalog(Settings(bundles=(other,)), encoders=Loopback(host), generators=None)
    with pytest.raises(BundleError, match="give every node the same bundles"):
        await gateway.connect()
    await gateway.stop()
    await behind.stop()


async def test_a_gateway_waits_for_replicas_of_its_own_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rolling update needs it: who answers first is an older replica, which goes later."""
    monkeypatch.setattr(catalogs, "_AGAIN_S", 0.0)
    old, new = (fake_catalog(fake_bundle(tmp_path / age / "mini", max_tokens=N)) for age, N in (("old", 64), ("new", 32)))
    hosts = [Host(old), Host(new)]
    for host in hosts:
        await host.start()
    pool = Loopback(hosts[0])
    gateway = GatewayCatalog(new.settings, encoders=pool, generators=None)
    connecting = asyncio.create_task(gateway.connect())
    while gateway.failure is None:  # noqa: ASYNC110  there is no event to wait for
        await asyncio.sleep(0)
    assert "give every node the same bundles" in gateway.failure
    assert not connecting.done()
    pool.host = hosts[1]
    await connecting
    assert gateway.failure is None
    await asyncio.to_thread(gateway.load)
    assert gateway.models
    await gateway.stop()
    for behind in (old, new):
        await behind.stop()


async def generating() -> tuple[PoolGenerator, Mortal, FakeGenerator]:
    model = FakeGenerator("wordy")
    host = Host(FakeGeneratorCatalog([model], Settings(threads=1, stream_interval_s=0)))
    await host.start()
    pool = Mortal(host)
    replicas = Replicas(pool)
    await replicas.connect()
    await replicas.stop()  # its heartbeat
    return PoolGenerator(replicas, "wordy", model.manifest.fingerprint), pool, model


async def test_a_prompt_that_others_delay_past_its_deadline_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, model = await generating()
    monkeypatch.setattr(ScriptedEngine, "prompt_token_s", 1.0)
    await engine.probe(0.0)
    model.engine.hold(after=0)
    (run,) = await engine.open([replace(REQUEST, prompt=(1,) * 100)], "")
    now = time.monotonic()
    with pytest.raises(QueueTooLong, match="the prompts before this one take about 50"), engine.expecting("", 100, now + 40):
        pass
    for tokens, deadline in ((99, now + 40), (100, now + 400)):
        with engine.expecting("", tokens, deadline):
            pass
    run.cancel()
    model.engine.release()


class Full(Mortal):
    """Refuses runs by turns, as told: at once, or, with `late`, after they were accepted."""

    turns: list[str]

    async def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        self.asked.append(f"{method} of {replica}")
        turn = self.turns.pop(0) if self.turns else ""
        if turn == "late":
            yield ""
        if turn:
            raise QueueTooLong("full", retry_after_s=1.0)
        async for message in super().stream(replica, method, *arguments):
            yield message


class Losing(Mortal):
    """Once a replica is asked for a run, the others are lost."""

    seen: Replicas

    async def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        for each in self.seen._replicas.values():
            each.lost = each.name != replica
        async for message in super().stream(replica, method, *arguments):
            yield message


@pytest.mark.parametrize("session", ["", "key"])
@pytest.mark.parametrize("turn", ["at once", "late"])
async def test_a_run_that_one_generator_refuses_another_takes(session: str, turn: str) -> None:
    """Whether it says so at once or when the run has waited there."""
    engine, pool, _ = await generating()
    pool.__class__ = Full
    assert isinstance(pool, Full)
    pool.turns = [turn]
    (run,) = await engine.open([REQUEST], session)
    async with asyncio.timeout(PATIENCE_S):
        assert "".join([delta.text async for delta in run]) == "Once "
    asked = [each for each in pool.asked if " of " in each]
    assert len(asked) == len(set(asked)) == 2
    assert not engine._replicas.refused
    assert not any(any(replica.runs.values()) for replica in engine._replicas._replicas.values())


@pytest.mark.parametrize("turn", ["at once", "late"])
async def test_a_run_that_two_generators_refuse_is_refused_and_counted(turn: str) -> None:
    """The one that had no free slot at first is asked again, to queue it, and its own one last."""
    engine, pool, _ = await generating()
    pool.__class__ = Full
    assert isinstance(pool, Full)
    pool.turns = [turn] * 4

    async def to_the_end() -> None:
        (run,) = await engine.open([REQUEST], "")
        async for _ in run:
            pass

    with pytest.raises(QueueTooLong, match="full"):
        await asyncio.wait_for(to_the_end(), PATIENCE_S)
    assert len(pool.turns) <= 2
    pool.turns = []
    assert engine._replicas.refused == {"wordy": 1}
    await asyncio.wait_for(to_the_end(), PATIENCE_S)
    assert engine._replicas.refused == {"wordy": 0}, "it came back, and the replica counts it"


async def test_a_run_without_a_session_does_not_wait_at_the_first_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are the same full one here: the first refuses it, the second has it wait."""
    engine, pool, _ = await generating()
    monkeypatch.setattr(ScriptedEngine, "full", True)
    (run,) = await engine.open([REQUEST], "")
    async with asyncio.timeout(PATIENCE_S):
        assert "".join([delta.text async for delta in run]) == "Once "
    assert pool.asked.count("generate") == 2
    (run,) = await engine.open([REQUEST], "session")
    assert pool.asked.count("generate") == 3
    run.cancel()


async def test_a_run_waits_at_a_full_generator_if_the_other_one_is_lost_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the simulation: the run was refused, although it could have waited for its turn."""
    engine, pool, _ = await generating()
    monkeypatch.setattr(ScriptedEngine, "full", True)
    pool.__class__ = Losing
    assert isinstance(pool, Losing)
    pool.seen = engine._replicas
    (run,) = await engine.open([REQUEST], "")
    async with asyncio.timeout(PATIENCE_S):
        assert "".join([delta.text async for delta in run]) == "Once "
    assert pool.asked.count("generate") == 2


async def test_who_leaves_all_runs_of_a_request_ends_them_where_they_are() -> None:
    engine, _, model = await generating()
    model.engine.hold(after=2)
    runs = await engine.open([REQUEST, REQUEST], "key")
    runs[0].cancel()
    await asyncio.to_thread(model.engine.wait, lambda: model.engine.runs[1].usage.completion_tokens)
    assert not any(run.cancelled for run in model.engine.runs), "one is still wanted, and they are one stream"
    runs[1].cancel()
    async with asyncio.timeout(PATIENCE_S):
        while not all(run.cancelled for run in model.engine.runs):  # noqa: ASYNC110
            await asyncio.sleep(0)
