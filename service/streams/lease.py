"""Who may send a run: one process at a time, for as long as it renews its lease.

The owner of a run renews its lease by writing the run's document, each time with the version that it wrote before. Another process takes
the run over in the same way. Then the first owner's next write fails, and it ends its stream without sending anything more. A process
that was paused for longer than a lease renews it before it sends anything.

The document is only needed to continue a stream. If the store fails, streams go on, and the failures are counted.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from service.errors import DocumentMoved, RunNotFound, ServiceError, StateNotFound
from service.states.record import Document, Quota
from service.states.refusals import document_moved
from service.states.store import GroupingEngine, Store
from service.streams.record import REQUEST_KIND, RUN_KIND, Progress, RunStart, Status, owner_of, pack, unpack
from service.telemetry.metrics import Metrics

log = logging.getLogger("attnserve")

LEASE_S = 15.0
KEPT_S = 3600.0  # a run can be continued so long after its end, or after its owner was lost
_RENEWALS = 3  # in a lease
_TOKENS = 256  # new tokens after which the progress is written, or an eighth of all if that is more
_PATIENCE_S = 5.0  # a send waits so long for a lease to be renewed
_WRITE_S = 0.05  # a stream waits so long for its document before it begins


class Lease:
    """The right to send one run. Used on the event loop."""

    def __init__(self, leases: "Leases", start: RunStart, progress: Progress, *, version: int, runs_s: float) -> None:
        """`version`: of the document. `runs_s`: seconds for which the stream may last."""
        self.start, self.progress = start, progress
        self.lost = False
        self.on_loss: Callable[[], None] = lambda: None  # called when another process has taken the run over
        self._leases = leases
        self._owner = secrets.token_hex(8)  # a stream that continues in the same process has another one
        self._version = version  # after `begin`, used by the store's thread only
        self._runs_s = runs_s
        self._closed = False
        self._valid_until = 0.0  # by the monotonic clock
        self._written = progress.n_tokens
        self._latest: Future[Any] | None = None

    @property
    def id(self) -> str:
        return self.start.id

    def begin(self) -> None:
        """Submit the first write of a new run."""
        self._submit(new=True)

    async def begun(self, *, patient: bool) -> bool:
        """Return whether the run is stored, or will probably be: if not `patient`, wait for the store for `_WRITE_S` at most, and return
        False on failure; otherwise raise the store's error."""
        assert self._latest is not None
        writing = asyncio.wrap_future(self._latest)
        try:
            await asyncio.wait_for(asyncio.shield(writing), None if patient else _WRITE_S)
        except TimeoutError:
            writing.add_done_callback(self._begun_late)
        except ServiceError as error:
            if patient:
                raise
            self._leases.count(error.code)
            return False
        return True

    def _begun_late(self, done: "asyncio.Future[Any]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._leases.count(error.code if isinstance(error, ServiceError) else "error")

    def note(self, index: int, token_ids: tuple[int, ...], *, ended: bool) -> None:
        """Note new tokens of a choice. They are written now and then."""
        self.progress.tokens[index].extend(token_ids)
        self.progress.ended[index] |= ended
        total = self.progress.n_tokens
        if total - self._written >= max(_TOKENS, total // 8):
            self.renew()

    def renew(self) -> None:
        """Submit the progress so far, and with it the end of the lease."""
        if not (self._closed or self.lost):
            self._submit()

    async def holds(self) -> bool:
        """Return whether this stream may still send. Asks the store only if the lease was not renewed in time.

        A store that fails or hangs takes nothing away: nobody can take the run over in it either. If this process was paused while it
        waited for the store, it asks again.
        """
        leases = self._leases
        while leases.clock() >= self._valid_until and not (self.lost or self._closed):
            asked = leases.clock()
            self.renew()
            assert self._latest is not None
            writing = asyncio.wrap_future(self._latest)
            writing.add_done_callback(lambda done: done.exception())  # `_done` notes it
            with suppress(ServiceError, TimeoutError):
                await asyncio.wait_for(asyncio.shield(writing), _PATIENCE_S)
            if (now := leases.clock()) - asked < leases.lease_s:
                self._valid_until = max(self._valid_until, now + leases.lease_s / _RENEWALS)  # when to ask again
        return not self.lost

    def close(self, status: Status) -> None:
        """End the lease. A run `in_progress` is sent by no process now, and can be continued like one that has ended."""
        if self._closed:
            return
        self._closed = True
        self._leases.forget(self)
        if not self.lost:
            self.progress.status = status
            self._submit(owner="")

    def abandon(self) -> None:
        """Delete the run: its client will not continue it."""
        self._closed = True
        self._leases.forget(self)
        key = self.start.tenant, self.id

        def erase(engine: GroupingEngine) -> None:
            for kind in (RUN_KIND, REQUEST_KIND):
                with suppress(StateNotFound):
                    engine.erase(key[0], kind, key[1], None)

        with suppress(ServiceError):
            self._leases.store.submit(erase).add_done_callback(Future.exception)

    def lose(self) -> None:
        """Another process, or another stream of this process, has the run now."""
        if not (self.lost or self._closed):
            self.lost = True
            self._leases.forget(self)
            self.on_loss()

    def taken(self, began: float) -> None:
        """Note that the lease was taken at `began`, by the monotonic clock."""
        self._valid_until = began + self._leases.lease_s

    def documents(self, owner: str | None = None) -> tuple[Document, Document]:
        """The run's document and that of its request, as they are to be written now."""
        leases, start, now = self._leases, self.start, time.time()
        run = Document(
            kind=RUN_KIND,
            id=self.id,
            tenant=start.tenant,
            body=pack(start, self.progress, self._owner if owner is None else owner),
            due=None if owner == "" else now + leases.lease_s,
            expires=now + KEPT_S,
        )
        expires = now + self._runs_s + leases.lease_s + KEPT_S  # not before the run's document
        return run, Document(kind=REQUEST_KIND, id=self.id, tenant=start.tenant, body=start.body, expires=expires)

    def write(self, engine: GroupingEngine, run: Document) -> None:
        """Write the run's document on the store's thread. Raises DocumentMoved or StateNotFound if another owner has written it.

        The owner in the document decides, not its version: after a write that was undone, this lease is one version ahead, and the next
        owner's first write has that version.
        """
        try:
            found = engine.read(run.tenant, RUN_KIND, run.id)
        except StateNotFound:
            if self._version:
                raise
            expected = 0
        else:
            expected = found.version
            if owner_of(found.body) != self._owner:
                raise document_moved(RUN_KIND, run.id, expected, self._version)
        self._version = engine.write(run, expected, self._leases.quota)

    def _submit(self, owner: str | None = None, *, new: bool = False) -> None:
        """Submit a write. The store carries writes out in order, so each knows the version of the one before."""
        leases, began = self._leases, self._leases.clock()
        run, request = self.documents(owner)
        self._written = self.progress.n_tokens

        def write(engine: GroupingEngine) -> None:
            if new:
                engine.write(request, 0, leases.quota)
            self.write(engine, run)

        try:
            self._latest = leases.store.submit(write)
        except ServiceError as error:
            self._latest = Future()
            self._latest.set_exception(error)
        loop = asyncio.get_running_loop()
        self._latest.add_done_callback(lambda done: _on(loop, self._done, done, began, new))

    def _done(self, done: "Future[None]", began: float, new: bool) -> None:
        error = done.exception()
        if error is None:
            self.taken(began)
        elif isinstance(error, DocumentMoved | StateNotFound):
            self.lose()
        elif not new:  # `begun` counts the others
            self._leases.count(error.code if isinstance(error, ServiceError) else "error")


def _on(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the service has stopped, and the loop is closed
        loop.call_soon_threadsafe(call, *arguments)


class Leases:
    """The leases of this process, on one store. One task renews all of them. Used on one event loop."""

    def __init__(
        self, store: Store, quota: Quota, metrics: Metrics, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`quota`: of each tenant. `clock`: monotonic, in seconds."""
        self.store, self.quota = store, quota
        self.lease_s, self.clock = lease_s, clock
        self.open: dict[str, Lease] = {}
        self._metrics = metrics
        self._renewing: asyncio.Task[None] | None = None

    def begin(self, start: RunStart, choices: int, *, runs_s: float) -> Lease:
        """Store a new run. `runs_s`: seconds for which its stream may last."""
        lease = Lease(self, start, Progress(tokens=[[] for _ in range(choices)], ended=[False] * choices), version=0, runs_s=runs_s)
        self._add(lease)
        lease.begin()
        return lease

    async def take_over(self, tenant: str, run: str, *, runs_s: float) -> Lease:
        """Become the owner of a stored run. Raises RunNotFound, also for another tenant's run, or DocumentMoved if others do the same."""
        began = self.clock()

        def take(engine: GroupingEngine) -> Lease:
            found, request = engine.read(tenant, RUN_KIND, run), engine.read(tenant, REQUEST_KIND, run)
            start, progress = unpack(run, tenant, found.body, request.body)
            if progress.status == "cancelled":
                raise RunNotFound(f"the run {run} was cancelled: send the request again", param="run")
            progress.status = "in_progress"
            lease = Lease(self, start, progress, version=found.version, runs_s=runs_s)
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
        lease.taken(began)
        if (here := self.open.get(run)) is not None:
            here.lose()
        self._add(lease)
        return lease

    def count(self, reason: str) -> None:
        """Count a failure to store a run."""
        self._metrics.unstored_runs.labels(reason).inc()

    def forget(self, lease: Lease) -> None:
        if self.open.get(lease.id) is lease:
            del self.open[lease.id]

    async def stop(self) -> None:
        """Stop renewing leases. Call this before the store is closed. Other processes can continue the runs."""
        if self._renewing is not None:
            self._renewing.cancel()
        for lease in list(self.open.values()):
            lease.close("in_progress")

    def _add(self, lease: Lease) -> None:
        self.open[lease.id] = lease
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        """Renew all leases, until there are none."""
        while self.open:
            await asyncio.sleep(self.lease_s / _RENEWALS)
            for lease in list(self.open.values()):
                lease.renew()
