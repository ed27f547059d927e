"""Which replica of a pool is asked, and what becomes of the calls of one that is silent."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.call import Call
from service.encoding.request import EncodeRequest
from service.errors import NotReady
from service.generation.run import Run
from service.pools import replicas as module
from service.pools.catalog import GatewayCatalog
from service.pools.generators import PoolGenerator
from service.pools.host import Host
from service.pools.replicas import ReplicaLost, Replicas
from service.settings import Settings
from tests.service.fakes import PATIENCE_S, until
from tests.service.generation_fakes import FakeGenerator, FakeGeneratorCatalog
from tests.service.pool_fakes import Loopback, gateway_of_encoder, stop
from tests.service.pools.test_client import REQUEST

KEY = ("mini", "abc")


class Freezing(Loopback):
    """Replicas that say nothing while they are frozen, as a stopped process; what they are asked meanwhile waits. "ended" has ended."""

    def __init__(self, host: Host, names: tuple[str, ...] = ("one", "other")) -> None:
        super().__init__(host, names)
        self.asked: Counter[tuple[str, str]] = Counter()
        self._running: dict[str, asyncio.Event] = {}
        for name in names:
            self.thaw(name)

    def freeze(self, name: str) -> None:
        self._running[name].clear()

    def thaw(self, name: str) -> None:
        self._running.setdefault(name, asyncio.Event()).set()

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        self.asked[replica, method] += 1
        if replica == "ended":
            raise ReplicaLost("gone")
        await self._running[replica].wait()
        answer = await super().call(replica, method, *arguments)
        await self._running[replica].wait()
        return answer

    async def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        self.asked[replica, method] += 1
        await self._running[replica].wait()
        async for message in super().stream(replica, method, *arguments):
            await self._running[replica].wait()
            yield message


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence after a fraction of a second."""
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(module, "SILENCE_S", 0.3)
    monkeypatch.setattr(module, "_FRESH_S", 60.0)  # so that a frozen one is still asked


@asynccontextmanager
async def encoding(folder: Path) -> AsyncIterator[tuple[GatewayCatalog, Freezing]]:
    """A gateway that is ready before two encoders."""
    gateway, pool = await gateway_of_encoder(folder, Freezing)
    try:
        yield gateway, pool
    finally:
        await stop(gateway, pool)


@asynccontextmanager
async def generating() -> AsyncIterator[tuple[PoolGenerator, Freezing, FakeGenerator, Replicas]]:
    """A gateway's engine before two generators, which share one fake."""
    model = FakeGenerator("wordy")
    host = Host(FakeGeneratorCatalog([model], Settings(threads=1, stream_interval_s=0)))
    await host.start()
    pool = Freezing(host)
    replicas = Replicas(pool)
    await replicas.connect()
    try:
        yield PoolGenerator(replicas, "wordy", model.manifest.fingerprint), pool, model, replicas
    finally:
        await replicas.stop()


async def ask(gateway: GatewayCatalog, text: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return (await gateway.get("mini").answer(EncodeRequest(inputs=[text]), Call("a", 0.0))).rows[0]


async def read(run: Run) -> str:
    return "".join([delta.text async for delta in run])


async def test_what_a_silent_encoder_was_asked_for_is_asked_of_another(tmp_path: Path) -> None:
    async with encoding(tmp_path) as (gateway, pool):
        pool.freeze("one")
        rows = await asyncio.gather(*(ask(gateway, f"cat {number}") for number in range(20)))
        assert len(rows) == 20
        assert pool.asked["one", "encode"], "none of the twenty waited for the silent one"
        before = pool.asked["one", "encode"]
        await asyncio.gather(*(ask(gateway, f"dog {number}") for number in range(20)))
        assert pool.asked["one", "encode"] == before, "a lost replica was asked"
        assert await gateway.ready()
        pool.thaw("one")
        await until(lambda: not any(replica.lost for replica in gateway._pools[0]._replicas.values()))
        async with asyncio.timeout(PATIENCE_S):  # on a busy machine it may be counted as silent once more, so one attempt proves nothing
            while pool.asked["one", "encode"] == before:
                await asyncio.gather(*(ask(gateway, f"cow {number}") for number in range(20)))


async def test_a_call_that_is_ending_already_can_be_given_up() -> None:
    """At its deadline, and twice before its task runs: the heartbeats of all replicas would end with the error."""
    replica = module.Replica("one")
    ended = asyncio.Event()

    async def call() -> None:
        try:
            async with replica.asked():
                try:
                    await asyncio.Event().wait()
                finally:
                    await ended.wait()
        except ReplicaLost:
            return
        raise AssertionError("it was not given up")

    calling = asyncio.create_task(call())
    await until(lambda: replica._calls)
    for _ in range(3):
        replica.give_up()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    ended.set()
    await asyncio.wait_for(calling, PATIENCE_S)


async def test_while_all_are_silent_requests_are_refused_at_once(tmp_path: Path) -> None:
    async with encoding(tmp_path) as (gateway, pool):
        for name in pool.names:
            pool.freeze(name)
        with pytest.raises(NotReady):
            await ask(gateway, "cat")
        assert not await gateway.ready()
        asked = pool.asked.copy()
        with pytest.raises(NotReady, match="no replica answers") as refused:
            await ask(gateway, "dog")
        assert refused.value.retry_after_s >= 1
        assert pool.asked["one", "encode"] == asked["one", "encode"]
        pool.names = ("third",)  # which has taken their place
        pool.thaw("third")
        assert await ask(gateway, "dog") is not None, "a replica that has just come is asked without waiting for its heartbeat"


async def test_a_request_waits_for_the_replica_that_replaces_the_last_one(tmp_path: Path) -> None:
    """During an update Serve's news of the new replica can be later than the end of the last old one."""
    async with encoding(tmp_path) as (gateway, pool):
        pool.names = ("ended",)  # its connection has ended, and the gateway does not know of another one
        asking = asyncio.create_task(ask(gateway, "cat"))
        await until(lambda: pool.asked["ended", "encode"] == 1)
        pool.names = ("new",)
        pool.thaw("new")
        assert await asking is not None
        assert pool.asked["new", "encode"] == 1


async def test_what_a_silent_generator_had_not_accepted_is_asked_of_another() -> None:
    async with generating() as (engine, pool, _, replicas):
        pool.freeze(replicas.owner("session", engine._key).name)
        async with asyncio.timeout(PATIENCE_S):
            (run,) = await engine.open([REQUEST], "session")
            assert await read(run) == "Once "
        assert pool.asked["one", "generate"] == pool.asked["other", "generate"] == 1


async def test_a_gateway_that_stood_still_itself_calls_no_replica_silent() -> None:
    async with generating() as (_, pool, _, replicas):
        await until(lambda: pool.asked["one", "heartbeat"] > 1)
        time.sleep(0.7)  # noqa: ASYNC251  which is what happens
        for _ in range(5):
            await asyncio.sleep(0)
        assert not any(replica.lost for replica in replicas._replicas.values())


class Named:
    """A pool of names alone."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def replicas(self) -> tuple[str, ...]:
        return self.names

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        raise NotImplementedError

    stream = call


def test_a_session_moves_only_with_its_replica() -> None:
    pool = Named("a", "b", "c")
    one, other = Replicas(pool), Replicas(Named("c", "a", "b"))  # type: ignore[arg-type]
    sessions = [f"session {number}" for number in range(300)]
    owners = {session: one.owner(session, KEY).name for session in sessions}
    assert owners == {session: other.owner(session, KEY).name for session in sessions}, "gateways agree"
    assert all(count > 60 for count in Counter(owners.values()).values())
    pool.names = ("a", "c")
    assert all(one.owner(session, KEY).name == owner for session, owner in owners.items() if owner != "b")


def test_a_replica_that_serves_another_version_or_is_sick_is_asked_last() -> None:
    replicas = Replicas(Named("old", "sick", "well"))  # type: ignore[arg-type]
    replicas.least(KEY)
    replicas._replicas["old"].models = {("mini", "of another age"): True}
    replicas._replicas["sick"].models = {KEY: False}
    replicas._replicas["well"].models = {KEY: True}
    assert {replicas.least(KEY).name for _ in range(50)} == {"well"}
    replicas._replicas["well"].lost = True
    assert {replicas.least(KEY).name for _ in range(50)} == {"old", "sick"}, "which say what is wrong"


async def test_the_replica_with_the_least_to_do_is_next() -> None:
    replicas = Replicas(Named("a", "b"))  # type: ignore[arg-type]
    first = replicas.least(KEY)
    async with first.asked(tokens=100):
        second = replicas.least(KEY)
        assert second is not first
        async with second.asked(tokens=50):
            assert replicas.least(KEY) is second
    assert (first.load, second.load) == (0, 0)


class Reporting(Named):
    """Each answers a heartbeat with `said`."""

    said: tuple[tuple[str, str, bool, int, float, str], ...] = ()

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        return 1, self.said


async def test_a_replica_that_leaves_hands_over_what_can_move_once_another_one_can_go_on() -> None:
    pool = Reporting("old")
    replicas = Replicas(pool)  # type: ignore[arg-type]
    old, ended = replicas.least(KEY), []
    old.numerics = {KEY: "ours"}

    async def call(name: str, movable: tuple[str, str] | None) -> None:
        try:
            async with old.asked(movable=movable):
                await asyncio.Event().wait()
        except ReplicaLost:
            ended.append(name)

    calls = {"moves": KEY, "of another model": ("other", "abc"), "stays": None}
    calling = [asyncio.create_task(call(name, movable)) for name, movable in calls.items()]
    await until(lambda: len(old._calls) == len(calls))

    async def ended_by(*said: tuple[str, str, bool, int, float, str]) -> list[str]:
        pool.said = said
        await replicas.ask()
        for _ in range(5):  # a call that is ended ends in the next turns of the event loop
            await asyncio.sleep(0)
        return ended

    pool.names = ("new",)
    assert not await ended_by(), "it says nothing of the model"
    assert not await ended_by((*KEY, False, 0, 0.0, "ours")), "it is not healthy"
    assert not await ended_by((*KEY, True, 0, 0.0, "theirs")), "it would refuse the runs"
    assert await ended_by((*KEY, True, 0, 0.0, "ours")) == ["moves"]
    assert await ended_by((*KEY, True, 0, 0.0, "ours")) == ["moves"]
    for each in calling:
        each.cancel()
    await asyncio.gather(*calling, return_exceptions=True)
