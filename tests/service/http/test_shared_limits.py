"""Gateways that share a store: limits hold over all of them, and usage outlives each."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from service.call import Call
from service.errors import RateLimited
from service.http import shared_limits
from service.http.shared_limits import SharedLimits, exchange
from service.http.tenants import Rate, Report, Tenant, TenantLimits, UsageCounts
from service.states.engine import StateEngine
from service.states.redis import RedisEngine
from service.states.sqlite import SqliteEngine
from service.states.store import Store
from tests.service.states.conftest import PASSWORD, Clock, clock, redis_server

__all__ = ("clock", "redis_server")  # fixtures


class CountingStore(Store):
    """Counts its calls."""

    calls = 0

    def submit(self, call: Callable[[StateEngine], Any]) -> Future[Any]:
        self.calls += 1
        return super().submit(call)


class Gateway:
    """One gateway with its tenant."""

    def __init__(self, store: CountingStore, clock: Clock, **limits: Any) -> None:
        self.store = store
        self.sharing = SharedLimits(clock=clock)
        self.sharing.open(store)
        self.tenant = Tenant("acme", clock=clock, sharing=self.sharing)
        self.tenant.limit(TenantLimits(**limits))

    async def admitted(self, requests: int) -> int:
        """Send requests until one is refused. Return how many were admitted."""
        for number in range(requests):
            if self.tenant.must_ask():
                await self.tenant.refill()
            try:
                self.tenant.admit()
            except RateLimited:
                return number
        return requests

    async def streams(self, wanted: int) -> list[Call]:
        """Open streams until one is refused."""
        opened: list[Call] = []
        for _ in range(wanted):
            try:
                await self.tenant.begin_stream(call := Call("id", 0.0))
            except RateLimited:
                break
            opened.append(call)
        return opened

    def answered(self, tokens: int) -> None:
        self.tenant.settle(Call("id", 0.0, model="mini", tokens=tokens), 200)

    async def used(self) -> tuple[dict[str, tuple[int, int]], bool]:
        _, usage, shared = await self.tenant.used()
        return {model: (counts.requests, counts.prompt_tokens) for model, counts in usage.items()}, shared


Make = Callable[..., Gateway]


@pytest.fixture(params=["folder", "redis"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Callable[[], StateEngine]:
    """Open the same store, once more at each call."""
    if request.param == "folder":
        return lambda: SqliteEngine(tmp_path / "states", clock=clock)
    server = request.getfixturevalue("redis_server")
    server.client.flushall()
    return lambda: RedisEngine(server.url, password=PASSWORD, clock=clock)


@pytest.fixture
def gateway(engine: Callable[[], StateEngine], clock: Clock) -> Iterator[Make]:
    """Make a gateway with a connection of its own to the store."""
    stores: list[CountingStore] = []

    def make(**limits: Any) -> Gateway:
        stores.append(CountingStore(engine()))
        return Gateway(stores[-1], clock, **limits)

    yield make
    for store in stores:
        store.close()


async def test_gateways_together_admit_the_limit_and_then_its_rate(gateway: Make, clock: Clock) -> None:
    first, second = (gateway(requests=Rate(60, 60.0)) for _ in range(2))
    assert [await first.admitted(20), await second.admitted(100), await first.admitted(100)] == [20, 30, 10]
    admitted = 60
    for _ in range(30):
        admitted += await first.admitted(5) + await second.admitted(5)
        clock.now += 1
        for each in (first, second):
            await each.sharing.report()
    assert 60 + 27 <= admitted <= 60 + 30


async def test_a_bucket_fills_up_to_what_other_gateways_do_not_hold(gateway: Make, clock: Clock) -> None:
    first, second = (gateway(requests=Rate(60, 60.0)) for _ in range(2))
    assert await first.admitted(1) == 1  # it holds 30
    clock.now += 4
    assert await second.admitted(100) == 30


async def test_a_burst_at_one_gateway_has_the_whole_limit_and_asks_the_store_a_few_times(gateway: Make) -> None:
    only = gateway(requests=Rate(600, 60.0))
    assert sum(await asyncio.gather(*(only.admitted(7) for _ in range(100)))) == 600
    assert only.store.calls <= 12
    assert dict(only.tenant.headers())[b"x-ratelimit-remaining-requests"] == b"0"


async def test_tokens_are_those_of_all_gateways(gateway: Make, clock: Clock) -> None:
    first, second = (gateway(tokens=Rate(100, 1.0)) for _ in range(2))
    assert (await first.admitted(1), await second.admitted(1)) == (1, 1)
    first.answered(400)
    await first.sharing.report()
    clock.now += 1
    await second.sharing.report()  # returns its piece
    assert (await first.admitted(1), await second.admitted(1)) == (0, 0), "300 tokens of debt, and 100 have come"
    clock.now += 2.1
    assert await second.admitted(1) == 1


async def test_streams_are_those_of_all_gateways(gateway: Make, clock: Clock) -> None:
    first, second = (gateway(streams=4) for _ in range(2))
    opened = [await first.streams(1), await second.streams(9), await first.streams(9)]
    assert [len(each) for each in opened] == [1, 2, 1]
    first.tenant.settle(opened[0][0], 200)
    for _ in range(2):  # it has needed streams until the first of these
        await first.sharing.report()
    assert len(await second.streams(9)) == 1


async def test_a_dead_gateways_usage_stays_and_what_it_held_comes_back(gateway: Make, clock: Clock) -> None:
    dead, alive = (gateway(requests=Rate(60, 3600.0), streams=2) for _ in range(2))
    assert (await dead.admitted(1), len(await dead.streams(2))) == (1, 2)
    dead.answered(7)
    await dead.sharing.report()
    alive.answered(5)
    assert await alive.used() == ({"mini": (2, 12)}, True)
    assert (await alive.admitted(60), await alive.streams(1)) == (30, [])  # the other half is the dead one's
    clock.now += shared_limits._LEASE_S
    await alive.sharing.report()
    assert (await alive.admitted(60), len(await alive.streams(2))) == (29, 2)


async def test_a_gateway_that_ends_returns_all_and_reports_the_rest(gateway: Make) -> None:
    ending, other = (gateway(requests=Rate(60, 3600.0)) for _ in range(2))
    await ending.admitted(1)
    ending.answered(7)
    await ending.sharing.close()
    assert (await other.admitted(60), await other.used()) == (59, ({"mini": (1, 7)}, True))


def test_a_report_that_is_sent_again_counts_once(engine: Callable[[], StateEngine], clock: Clock) -> None:
    """The answer to the first one may have been lost."""
    opened, limits = engine(), TenantLimits(requests=Rate(60, 60.0))
    report = Report("one", {"requests": 10}, {"mini": UsageCounts(1, 2, 3)})
    for _ in range(2):
        grant = exchange(opened, "acme", limits, "gateway", report, ["requests"], 0, clock())
        assert (grant.pieces, grant.left) == ({"requests": 25}, {"requests": 25})
    account, _ = shared_limits._read(opened, "acme", 0)
    assert account["usage"] == {"mini": [1, 2, 3]}
    opened.close()


def said(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [each.levelno for each in caplog.records if each.name == "attnserve.keys"]


async def test_without_the_store_each_gateway_has_its_share_and_reports_later(
    gateway: Make, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("attnserve").propagate = True
    caplog.set_level(logging.INFO, "attnserve.keys")
    first, second = (gateway(requests=Rate(60, 60.0), streams=8) for _ in range(2))
    for each in (first, second):
        assert await each.admitted(15) == 15
    second.store.close()
    second.answered(7)
    for _ in range(2):
        await second.sharing.report()
        clock.now += 3600
    assert await second.admitted(100) == 30
    assert len(await second.streams(9)) == 4
    assert await second.used() == ({"mini": (1, 7)}, False)
    assert said(caplog) == [logging.WARNING]
    second.sharing.open(gateway().store)  # it is back
    await second.sharing.report()
    assert said(caplog) == [logging.WARNING, logging.INFO]
    assert await second.used() == ({"mini": (1, 7)}, True)
    assert await second.admitted(100) == 30, "the others were admitted while the store was away"


async def test_a_store_that_does_not_answer_holds_no_request(gateway: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    only, stuck = gateway(requests=Rate(60, 60.0)), threading.Event()
    monkeypatch.setattr(shared_limits, "_PATIENCE_S", 0.01)
    only.store.submit(lambda engine: stuck.wait())
    try:
        assert await only.admitted(100) == 60
        assert only.store.calls == 2
    finally:
        stuck.set()
