"""Leases: only one process at a time may send a run to its client, and only while it renews its lease of the run.

The owner of a run renews its lease by writing the run's document, which must still name it as the owner. Another process takes the run over
by writing itself into the document. Then the first owner's next write fails, and it ends its stream without sending anything more. A
process that was paused for longer than a lease renews it before it sends anything.

A completed run does not change any more, so any number of streams may send it at once, and none of them writes its document.

The document is needed only to continue a stream. If the store is slow or fails, streams are still sent, and the failures are counted. If
the document is missing in the store, the next renewal writes it again.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from service.errors import DocumentMoved, RunNotFound, ServiceError, StateNotFound
from service.states.engine import StateEngine
from service.states.record import Document, Quota
from service.states.refusals import document_moved
from service.states.store import Store
from service.streams.record import REQUEST_KIND, RUN_KIND, Progress, RunStart, Status, owner_of, pack, unpack
from service.telemetry.metrics import Metrics

log = logging.getLogger("attnserve")

LEASE_S = 10.0  # an owner that has not renewed its lease for so many seconds is considered lost
KEPT_S = 3600.0  # seconds for which a run can be continued after its end, or after its owner was lost
_RENEWALS = 3  # a lease is renewed so many times in `LEASE_S` seconds
_TOKENS = 256  # the progress is written after so many new tokens, or after an eighth of the run's tokens if that is more
_LEAVES_S = 1.0  # longest wait, in seconds, until an earlier stream of this process has ended whose run is taken over
_PATIENCE_S = 5.0  # longest time that one attempt to renew the lease delays a send, in seconds
_WRITE_S = 0.05  # longest time, in seconds, that the beginning of a stream waits until the run's document is written


class Lease:
    """The right of one stream of this process to send a run. Use it on the event loop."""

    def __init__(self, leases: "Leases", start: RunStart, progress: Progress, *, runs_s: float) -> None:
        """`runs_s`: the longest duration of the stream, in seconds."""
        self.start, self.progress = start, progress
        self.lost = False
        self.on_loss: Callable[[], None] = lambda: None  # called when another process has taken the run over
        self.ended = asyncio.Event()  # set when this stream has ended: it sends nothing more
        self._leases = leases
        self._owner = secrets.token_hex(8)  # each stream has its own owner id, even if two streams of this process send the same run
        self._expires = math.inf  # expiry of the last written document, in Unix time; only the store's thread uses it
        self._runs_s = runs_s
        self._closed = progress.status == "completed"
        self._valid_until = 0.0  # end of the lease, by the monotonic clock
        self._written = progress.n_tokens
        self._latest: Future[Any] | None = None

    @property
    def id(self) -> str:
        return self.start.id

    async def begun(self, *, patient: bool) -> bool:
        """Wait for the first write, and return whether the run can be continued later.

        If `patient`, wait until the write has ended, and raise the store's error if it failed. Otherwise wait for at most `_WRITE_S`.
        Return False if the write failed, and True if it has not ended, since it will probably succeed.
        """
        try:
            await self._latest_write(None if patient else _WRITE_S)
        except ServiceError:
            if patient:
                raise
            return False
        return True

    def note(self, index: int, token_ids: tuple[int, ...], *, ended: bool) -> None:
        """Add new tokens of a choice to the progress. The progress is written when enough tokens are new."""
        self.progress.tokens[index].extend(token_ids)
        self.progress.ended[index] |= ended
        total = self.progress.n_tokens
        if total - self._written >= max(_TOKENS, total // 8):
            self.renew()

    def renew(self) -> None:
        """Submit a write of the progress so far. The write also renews the lease."""
        if not (self._closed or self.lost):
            self._submit()

    async def holds(self) -> bool:
        """Return whether this stream may still send. Waits for the store only if the lease was not renewed in time.

        If the store fails or hangs, the stream may go on, because no other process can take the run over in such a store either. If this
        process was paused while it waited for the store, it asks the store again.
        """
        leases = self._leases
        while leases.clock() >= self._valid_until and not (self.lost or self._closed):
            asked = leases.clock()
            self.renew()
            with suppress(ServiceError):
                await self._latest_write(_PATIENCE_S)
            if (now := leases.clock()) - asked < leases.lease_s:
                self._valid_until = max(self._valid_until, now + leases.lease_s / _RENEWALS)  # the time at which to ask the store again
        return not self.lost

    def close(self, status: Status) -> None:
        """End the lease, and write the run's status. With status `in_progress`, the run has not ended, and any process may continue it."""
        self.ended.set()
        if self._closed:
            return
        self._closed = True
        self._leases.forget(self)
        if not self.lost:
            self.progress.status = status
            self._submit(owner="")

    def abandon(self) -> None:
        """End the lease and delete the stored run, which cannot be continued: its client never gets its id."""
        self.ended.set()
        self._closed = True
        self._leases.forget(self)

        def erase(engine: StateEngine) -> None:
            for kind in (RUN_KIND, REQUEST_KIND):
                with suppress(StateNotFound):
                    engine.erase(self.start.tenant, kind, self.id, None)

        with suppress(ServiceError):
            self._leases.store.submit(erase).add_done_callback(Future.exception)

    def lose(self) -> None:
        """End the lease because another process, or another stream of this process, has taken the run over."""
        if not (self.lost or self._closed):
            self.lost = True
            self._leases.forget(self)
            self.on_loss()

    def taken(self, began: float) -> None:
        """Note that the lease was taken at `began`, by the monotonic clock."""
        self._valid_until = began + self._leases.lease_s

    def documents(self, owner: str | None = None) -> tuple[Document, Document]:
        """Return the two documents to write now, of the run and of its request. `owner` is the owner that the run's document names: "" for
        no owner, None for this stream.
        """
        leases, start, now = self._leases, self.start, time.time()
        run = Document(
            kind=RUN_KIND,
            id=self.id,
            tenant=start.tenant,
            body=pack(start, self.progress, self._owner if owner is None else owner),
            due=None if owner == "" else now + leases.lease_s,
            expires=now + KEPT_S,
        )
        expires = now + self._runs_s + leases.lease_s + KEPT_S  # not earlier than the expiry of the run's document
        return run, Document(kind=REQUEST_KIND, id=self.id, tenant=start.tenant, body=start.body, expires=expires)

    def write(self, engine: StateEngine, run: Document, request: Document) -> None:
        """Write the run's document, and also its request if the store has no document of the run. Runs on the store's thread.

        Raises DocumentMoved if the stored document names another owner, or StateNotFound if the document is missing and may have expired.
        The owner is compared, not a version, because it is unknown whether a failed write has changed the version.
        """
        quota, expected = self._leases.quota, 0
        try:
            found = engine.read(run.tenant, RUN_KIND, run.id)
        except StateNotFound:
            if time.time() >= self._expires:
                raise
            engine.write(request, None, quota)
        else:
            expected = found.version
            if owner_of(found.body) != self._owner:
                raise document_moved(RUN_KIND, run.id, expected, 0)
        engine.write(run, expected, quota)
        self._expires = run.expires or math.inf

    async def _latest_write(self, timeout_s: float | None) -> None:
        """Wait until the latest write has ended, but no longer than `timeout_s`. Raises the store's error."""
        assert self._latest is not None
        writing = asyncio.wrap_future(self._latest)
        writing.add_done_callback(lambda done: done.exception())  # so that asyncio does not log the error, which `_done` handles
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(writing)

    def _submit(self, owner: str | None = None) -> None:
        """Submit a write of the documents, with `owner` as in `documents`. The store carries out writes in the order in which they were
        submitted.
        """
        leases, began = self._leases, self._leases.clock()
        run, request = self.documents(owner)
        self._written = self.progress.n_tokens

        try:
            self._latest = leases.store.submit(lambda engine: self.write(engine, run, request))
        except ServiceError as error:
            self._latest = Future()
            self._latest.set_exception(error)
        loop = asyncio.get_running_loop()
        self._latest.add_done_callback(lambda done: _on(loop, self._done, done, began))

    def _done(self, done: "Future[None]", began: float) -> None:
        error = done.exception()
        if error is None:
            self.taken(began)
        elif isinstance(error, DocumentMoved | StateNotFound):
            self.lose()
        else:
            self._leases.count(error.code if isinstance(error, ServiceError) else "error")


def _on(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # raised if the service has stopped and the loop is closed
        loop.call_soon_threadsafe(call, *arguments)


class Leases:
    """All leases of this process, in one store. One task renews them. Use it on one event loop."""

    def __init__(
        self, store: Store, quota: Quota, metrics: Metrics, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`quota`: the quota of each tenant in the store. `clock`: a monotonic clock, in seconds."""
        self.store, self.quota = store, quota
        self.lease_s, self.clock = lease_s, clock
        self.open: dict[str, Lease] = {}
        self._metrics = metrics
        self._renewing: asyncio.Task[None] | None = None

    def begin(self, start: RunStart, choices: int, *, runs_s: float) -> Lease:
        """Return the lease of a new run with so many choices, and begin to write the run's document to the store. `runs_s`: the longest
        duration of its stream, in seconds."""
        lease = Lease(self, start, Progress(tokens=[[] for _ in range(choices)], ended=[False] * choices), runs_s=runs_s)
        self._add(lease)
        lease.taken(self.clock())  # it is valid at once, since no other process can find the run before its first write
        lease.renew()
        return lease

    async def take_over(self, tenant: str, run: str, *, runs_s: float) -> Lease:
        """Return the lease of a stored run, after writing this process into its document as the owner. The lease of a completed run is
        closed already: nothing is written.

        Raises RunNotFound if the tenant has no such run, or DocumentMoved if another process takes it over at the same time.
        """
        began = self.clock()

        def take(engine: StateEngine) -> Lease:
            found, request = engine.read(tenant, RUN_KIND, run), engine.read(tenant, REQUEST_KIND, run)
            start, progress = unpack(run, tenant, found.body, request.body)
            lease = Lease(self, start, progress, runs_s=runs_s)
            if progress.status != "completed":
                progress.status = "in_progress"
                document, request = lease.documents()
                engine.write(document, found.version, self.quota)
                engine.write(request, None, self.quota)
            return lease

        try:
            lease = await self.store.call(take)
        except StateNotFound:
            raise RunNotFound(
                f"there is no run {run}: a stream can be continued for {KEPT_S:g} s after its end; send the request again", param="run"
            ) from None
        if lease.progress.status == "completed":
            return lease
        lease.taken(began)
        if (here := self.open.get(run)) is not None:
            here.lose()
            with suppress(TimeoutError):  # the earlier stream counts towards the tenant's limit until it ends
                async with asyncio.timeout(_LEAVES_S):
                    await here.ended.wait()
        self._add(lease)
        return lease

    def count(self, reason: str) -> None:
        """Count in the metrics that a run could not be stored."""
        self._metrics.unstored_runs.labels(reason).inc()

    def forget(self, lease: Lease) -> None:
        if self.open.get(lease.id) is lease:
            del self.open[lease.id]

    async def stop(self) -> None:
        """End all leases, so that other processes can continue the runs. Call this before the store is closed."""
        if self._renewing is not None:
            self._renewing.cancel()
        for lease in list(self.open.values()):
            lease.close("in_progress")

    def _add(self, lease: Lease) -> None:
        self.open[lease.id] = lease
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        """Renew all leases periodically, until no lease is left."""
        while self.open:
            await asyncio.sleep(self.lease_s / _RENEWALS)
            for lease in list(self.open.values()):
                lease.renew()
