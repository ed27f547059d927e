"""Shares the limits and the usage of tenants between the gateways of one store.

Each tenant has an account in the store, which is one document: its usage, the levels of its buckets, and what each gateway holds. A gateway
takes a piece of a bucket, half of what is left, and admits requests from it without asking the store. Once a second it reports what it has
used, returns the rest, and takes another piece if the tenant still sends. A request waits for the store only if the piece is used up.

So all gateways together admit no more than the limit, apart from what the bucket fills within a second and what a gateway admits while
its report is under way, which is charged afterwards. While other gateways hold pieces, one of them may refuse up to a second early. If a
gateway dies, what it holds returns to the bucket when its lease expires, and its usage of the last second is lost.

If the store fails or is slow, each gateway goes on with its share of the limits, and reports later what it has used.
"""

import asyncio
import heapq
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from service.catalog import Catalog
from service.errors import DocumentMoved, ServiceError, StateNotFound, StoreFailed
from service.http.tenants import Grant, Report, Tenant, TenantLimits, UsageByModel, UsageCounts
from service.settings import IN_MEMORY
from service.states.engine import StateEngine
from service.states.opening import open_store
from service.states.record import Document, Quota
from service.states.store import Store
from service.telemetry.state_store_metrics import StateStoreMetrics

log = logging.getLogger("attnserve.keys")

_REPORTS_S = 1.0  # seconds between two reports of a tenant
_LEASE_S = 5.0  # seconds without a report after which what a gateway holds returns to the bucket; clocks may differ by less
_KNOWN_S = 60.0  # seconds after the end of its lease for which a gateway's last report is remembered
_PATIENCE_S = 0.5  # longest time, in seconds, that a request waits for the store
_MOST_REPORTS = 256  # limit on the reports at one time; further tenants report later
_ATTEMPTS = 8  # to write an account, which other gateways may change at the same time
_KIND = "account"
_NO_QUOTA = Quota(states=2**31, size=2**62)  # an account has a bounded size


class SharedLimits:
    """Reports for the tenants of this gateway. Use it on the event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970, about the same at all gateways."""
        self.changed: set[Tenant] = set()
        self._clock = clock
        self._gateway = secrets.token_hex(8)
        self._store: Store | None = None
        self._own: Store | None = None  # the store, if it was opened here
        self._away = self._closing = False
        self._exchanges: dict[Tenant, asyncio.Task[None]] = {}
        self._unanswered: dict[Tenant, Report] = {}

    @property
    def on(self) -> bool:
        return self._store is not None

    def open(self, store: Store) -> None:
        """Begin to share. Until then each tenant has its whole limits here."""
        self._store = store

    async def watch(self, catalog: Catalog) -> None:
        """Open the store when the models are loaded, and report to it, forever. Does nothing if the store is in memory of one process."""
        settings = catalog.settings
        await catalog.warm.wait()
        if not settings.needs_key or settings.states == IN_MEMORY or catalog.failure:
            return
        if catalog.states is None:  # no decoder is served
            try:
                self._own = await asyncio.to_thread(open_store, settings.states, StateStoreMetrics(catalog.metrics))
            except StoreFailed as error:
                log.warning("limits and usage of tenants are this gateway's own", extra={"error": error.message})
                return
        self.open(catalog.states or self._own)  # type: ignore[arg-type]
        while True:
            await asyncio.sleep(_REPORTS_S)
            await self.report()

    async def report(self) -> None:
        """Report for the tenants whose last report is the oldest."""
        due = heapq.nsmallest(_MOST_REPORTS, self.changed, key=lambda tenant: tenant.reported_at)
        await asyncio.gather(*(self.ask(tenant, rest=True) for tenant in due))

    async def close(self) -> None:
        """Report what is left, return all pieces, and end the sharing."""
        self._closing = True
        for _ in range(-(-len(self.changed) // _MOST_REPORTS)):
            await self.report()
        self._store = None
        if self._own is not None:
            await asyncio.to_thread(self._own.close)

    async def ask(self, tenant: Tenant, *, rest: bool = False) -> None:
        """Report for a tenant and take what it wants, or wait for the report that is under way. If the store fails, or does not answer in
        time, the tenant goes on with this gateway's share of its limits. After a report with `rest`, the tenant wants nothing until it
        needs something again."""
        exchange = self._exchanges.get(tenant)
        if exchange is None:
            exchange = self._exchanges[tenant] = asyncio.create_task(self._exchange(tenant, rest))
            exchange.add_done_callback(lambda _: self._exchanges.pop(tenant, None))
        await asyncio.wait([exchange], timeout=_PATIENCE_S)
        if not exchange.done():
            self._failed(tenant, f"the store of states has not answered for {_PATIENCE_S} s")

    async def _exchange(self, tenant: Tenant, rest: bool) -> None:
        assert self._store is not None
        report = self._unanswered.get(tenant)
        if report is None:
            report = self._unanswered[tenant] = tenant.report(secrets.token_hex(8))
        asked = (tenant.name, tenant.limits, self._gateway, report, () if self._closing else tenant.wanted(), tenant.streams)
        if rest:
            tenant.rest()
        try:
            grant = await self._store.call(lambda engine: exchange(engine, *asked, self._clock()))
        except Exception as error:  # also for an account that cannot be read
            self._failed(tenant, f"{type(error).__name__}: {error}")
            return
        del self._unanswered[tenant]
        if not tenant.granted(report, grant):
            self.changed.discard(tenant)
        if self._away:
            log.info("limits and usage of tenants are shared again")
        self._away = False

    def _failed(self, tenant: Tenant, reason: str) -> None:
        tenant.alone()
        if not self._away:
            log.warning("limits of tenants are shares of this gateway, because the store is away", extra={"error": reason})
        self._away = True

    async def stored(self, tenant: Tenant) -> tuple[int, UsageByModel] | None:
        """Return since when the tenant's usage is counted, and its usage at all gateways, or None if the store is away."""
        if self._store is None:
            return None
        if tenant in self.changed:
            await self.ask(tenant)
        if tenant in self._unanswered:
            return None
        try:
            account, _ = await self._store.call(lambda engine: _read(engine, tenant.name, tenant.since_s))
        except ServiceError:
            return None
        return account["since"], {model: UsageCounts(*counts) for model, counts in account["usage"].items()}


def exchange(
    engine: StateEngine,
    tenant: str,
    limits: TenantLimits,
    gateway: str,
    report: Report,
    wanted: Sequence[str],
    streams: int,
    now: float,
) -> Grant:
    """Add a gateway's report to the tenant's account, and replace what the gateway holds by pieces of the buckets in `wanted` ("requests",
    "tokens", "streams"). `streams`: the number of streams that are open there. Raises StoreFailed."""
    for _ in range(_ATTEMPTS):
        account, version = _read(engine, tenant, int(now))
        grant = _settle(account, limits, gateway, report, wanted, streams, now)
        try:
            engine.write(Document(kind=_KIND, id=_KIND, tenant=_apart(tenant), body=orjson.dumps(account)), version, _NO_QUOTA)
        except DocumentMoved:
            continue
        return grant
    raise StoreFailed(f"the account of tenant {tenant} was changed by other gateways {_ATTEMPTS} times: it is reported again later")


def _read(engine: StateEngine, tenant: str, now: int) -> tuple[dict[str, Any], int]:
    """Return the tenant's account, or a new one, and its version."""
    try:
        document = engine.read(_apart(tenant), _KIND, _KIND)
    except StateNotFound:
        return {"since": now, "at": now, "usage": {}, "levels": {}, "gateways": {}}, 0
    return orjson.loads(document.body), document.version


def _settle(
    account: dict[str, Any], limits: TenantLimits, gateway: str, report: Report, wanted: Sequence[str], streams: int, now: float
) -> Grant:
    """Change the account, and return what the gateway gets; see `exchange`."""
    gateways, levels = account["gateways"], account["levels"]
    own = gateways.setdefault(gateway, {"held": {}, "streams": 0, "report": ""})
    new = own["report"] != report.id
    if new:
        for model, used in report.usage.items():
            counts = account["usage"].get(model, (0, 0, 0))
            added = (used.requests, used.prompt_tokens, used.completion_tokens)
            account["usage"][model] = [a + b for a, b in zip(counts, added, strict=True)]
    own |= {"until": now + _LEASE_S, "report": report.id, "streams": streams}
    for id, each in list(gateways.items()):
        if each is own or each["until"] <= now:
            for what, amount in each["held"].items():
                levels[what] = levels.get(what, 0.0) + amount
            each["held"] = {}
        if each["until"] <= now:
            each["streams"] = 0
        if each["until"] + _KNOWN_S <= now:
            del gateways[id]

    passed_s, account["at"] = max(now - account["at"], 0.0), max(now, account["at"])
    left: dict[str, float] = {}
    for what, rate in (("requests", limits.requests), ("tokens", limits.tokens)):
        if rate is None:
            levels.pop(what, None)
            continue
        elsewhere = sum(each["held"].get(what, 0.0) for each in gateways.values())
        level = levels.get(what, rate.most - elsewhere) - (report.taken.get(what, 0.0) if new else 0.0)
        level = min(level + passed_s * rate.per_s, rate.most - elsewhere)
        if what in wanted:
            own["held"][what] = 0.0 if level < 1 else min(level, max(level // 2, rate.least_piece))
        levels[what] = left[what] = level - own["held"].get(what, 0.0)
    if limits.streams is not None:
        free = max(limits.streams - sum(each["streams"] for each in gateways.values()), 0)
        own["streams"] += min(free, max(free // 2, 1)) if "streams" in wanted else 0
    held = sum(each["until"] > now for each in gateways.values())
    return Grant(own["held"], left, own["streams"], held)


def _apart(tenant: str) -> str:
    """Return the tenant under which an account is stored. No API key has this tenant, so the account does not count against the quota of
    the real tenant's states."""
    return f"{tenant}/account"
