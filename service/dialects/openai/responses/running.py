"""Manages the responses that this process generates, and takes over responses from processes that were lost."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from service.call import Call, CallTenant
from service.catalog import Catalog
from service.dialects.openai.responses.live import Live
from service.dialects.openai.responses.preparing import beginning, prepare
from service.dialects.openai.responses.schemas import ResponseRequest
from service.dialects.openai.responses.stored import KIND, ResponseLease, Row, failed
from service.dialects.states.finding import store_of
from service.dialects.text.answer import new_id
from service.errors import DocumentMoved, NotReady, Overloaded, RateLimited, RuntimeFailed, ServiceError, StateNotFound
from service.runtime.lanes import Lane
from service.streams.lease import LEASE_S

log = logging.getLogger("attnserve")

_SWEEP_S = 2.0  # seconds between two searches for responses without an owner
_AT_ONCE = 64  # limit on the responses that one search returns
_MOST_OWNERS = 5  # a response fails after so many owners, because it may have crashed their processes
_MOST = 1024  # limit on the background responses of this process, for all tenants together
_RETRY_S = 5.0


class Running:
    """The responses that this process generates. Stored responses can be found by id. Use it on the event loop."""

    def __init__(self, catalog: Catalog) -> None:
        self.tenant_named: Callable[[str], CallTenant | None] = lambda name: None
        self._catalog = catalog
        self._lives: dict[tuple[str, str], Live] = {}

    def check_room(self, tenant: str) -> None:
        """Raise RateLimited if the tenant or this process has reached its limit on responses in the background."""
        most = self._catalog.settings.max_background
        tenants = [key[0] for key, live in self._lives.items() if live.unattended]
        own = tenants.count(tenant)
        if own >= most or len(tenants) >= _MOST:
            raise RateLimited(
                f"{own} background responses are being generated for you here, and the most is {most} (max_background; {_MOST} for all "
                "tenants together): send the request again when one has ended",
                retry_after_s=_RETRY_S,
            )

    def begin(self, tenant: str, live: Live) -> None:
        """Start to generate a response of this tenant."""
        key = tenant, live.answer.head["id"]
        self._lives[key] = live
        live.start().add_done_callback(lambda _: self._lives.pop(key, None))

    def live(self, tenant: str, response: str) -> Live | None:
        """Return the response with this id if this process generates it, else None."""
        return self._lives.get((tenant, response))

    async def close(self) -> None:
        """Release the responses that other processes can continue. Call this before the engines stop."""
        lives = list(self._lives.values())
        for live in lives:
            if live.continuable:
                live.stop("released")
        with suppress(TimeoutError):
            async with asyncio.timeout(LEASE_S):
                await asyncio.gather(*(live.over() for live in lives))

    # Taking over -------------------------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Take over responses without an owner, forever."""
        await self._catalog.warm.wait()
        while self._catalog.states is not None:
            try:
                await self.sweep()
            except ServiceError as error:
                log.warning("a sweep for responses without an owner failed", extra={"error": error.code})
            except Exception:
                log.exception("a sweep for responses without an owner failed")
            await asyncio.sleep(_SWEEP_S * random.uniform(0.8, 1.2))

    async def sweep(self) -> None:
        """Take over responses whose owner is lost or has released them, up to the limits of the tenant and this process. Responses that
        cannot be taken over are marked as failed."""
        store, now = store_of(self._catalog), time.time()
        for document in await store.call(lambda engine: engine.due(KIND, now, _AT_ONCE)):
            row = Row.of(document)
            if (row.tenant, row.id) not in self._lives:  # else this process generates it, and renews the lease late
                with suppress(DocumentMoved, StateNotFound):  # another process was faster
                    await self._take_over(row)

    async def _take_over(self, row: Row) -> None:
        """Continue a response after its stored tokens. Raises DocumentMoved if another process takes it over at the same time."""
        leases = self._catalog.leases
        assert leases is not None
        if row.work is None or row.owners >= _MOST_OWNERS:
            why = "the process that generated this response was lost" if row.work is None else f"{row.owners} processes were lost with it"
            ended = failed(row, RuntimeFailed(f"{why}: send the request again"))
            await leases.store.call(lambda engine: engine.write(ended.document(), row.version, leases.quota))
            return
        try:
            self.check_room(row.tenant)
        except RateLimited:
            return
        lease = await leases.take(lambda engine: (ResponseLease(leases, row), row.version))
        call = call_of(row, self.tenant_named(row.tenant))
        body = ResponseRequest.model_validate(row.work["body"])
        try:
            begin = await beginning(body, None, self._catalog, call)
            prepared = await prepare(body, begin, self._catalog, call, response=row.id, again=True)
        except (NotReady, Overloaded):  # the response waits for another owner
            await lease.finish(replace(row, due=time.time() + LEASE_S))
        except ServiceError as error:
            await lease.finish(failed(row, error))
        else:
            self.begin(row.tenant, Live(self._catalog, prepared, row.answer(), call, lease=lease, streamed=False, said=row.said()))


def call_of(row: Row, tenant: CallTenant | None) -> Call:
    """Return a call for a response without a waiting client. So the call has no deadline."""
    work = row.work or {}
    lane = Lane[work.get("lane") or Lane.BULK.name]
    client = work.get("client", "")
    return Call(new_id("background_"), time.monotonic(), math.inf, lane, client=client, host=client, tenant=tenant)


def running_of(catalog: Catalog) -> Running:
    """Return the catalog's `Running`, which is created at the first call."""
    found = catalog.companions.setdefault(Running, Running(catalog))
    assert isinstance(found, Running)
    return found
