"""Leases: only one process at a time may send or generate a stored run, and only while it renews its lease of the run.

The owner of a run renews its lease by writing the run's document, which must still name it as the owner. Another process takes the run over
by writing itself into the document. Then the first owner's next write fails, and it ends its work on the run without sending anything more.
A process that was paused for longer than a lease renews it before it sends anything.

A completed stream does not change any more, so any number of connections may send it at once, and none of them writes its document.

A stream can be continued only by its client, which takes the run over (`take_over`). A response is continued by the sweep of
`service/dialects/openai/responses/running.py`, which takes over responses whose owner is lost. A stream needs its document only to be
continued: if the store is slow or fails, it is still sent, and the failures are counted. If its document is missing in the store, the next
renewal writes it again.
"""

import asyncio
import logging
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from service.errors import DocumentMoved, RunNotFound, ServiceError, StateNotFound
from service.states.engine import StateEngine
from service.states.record import Document, Quota
from service.states.refusals import document_moved, no_document
from service.states.store import Store
from service.streams.record import REQUEST_KIND, RUN_KIND, Progress, RunStart, Status, owner_of, pack, unpack
from service.telemetry.metrics import Metrics

log = logging.getLogger("attnserve")

LEASE_S = 10.0  # an owner that has not renewed its lease for so many seconds is considered lost
KEPT_S = 3600.0  # seconds for which a stream can be continued after its end, or after its owner was lost
_RENEWALS = 3  # a lease is renewed so many times in `LEASE_S` seconds
_TOKENS = 256  # the progress of a stream is written after so many new tokens, or after an eighth of its tokens if that is more
_LEAVES_S = 1.0  # longest wait, in seconds, until an earlier stream of this process has ended whose run is taken over
_PATIENCE_S = 5.0  # longest time that one attempt to renew the lease delays a send, in seconds
_TRIES = 5  # attempts to write a run, if other processes write it or its conversation at the same time
_WRITE_S = 0.05  # longest time, in seconds, that the beginning of a stream waits until the run's document is written

Put = Callable[[StateEngine, int | None], Any]  # writes a run whose document has this version now; 0: it has no document


class Lease(ABC):
    """The right of this process to work on a run. Use it on the event loop. Subclasses define how the run is stored."""

    kind: str  # kind of the run's document

    def __init__(self, leases: "Leases", tenant: str, id: str) -> None:
        self.tenant, self.id = tenant, id
        self.owner = secrets.token_hex(8)  # each lease has its own, even if two leases of this process are of the same run
        self.lost = False
        self.on_loss: Callable[[], None] = lambda: None  # called when another process has taken the run over
        self.ended = asyncio.Event()  # set when the work on the run has ended here: this process sends nothing more
        self._leases = leases
        self.closed = False
        self._valid_until = leases.clock() + leases.lease_s  # by the monotonic clock; the first write comes later, and names this owner
        self._latest: Future[Any] | None = None

    @abstractmethod
    def snapshot(self, owner: str) -> Put:
        """Return a function that writes the run as it is now, with this owner; "": none. It is called on the store's thread."""

    @abstractmethod
    def erase(self, engine: StateEngine) -> None:
        """Delete the stored run, if there is one. Runs on the store's thread."""

    def begin(self) -> None:
        """Renew the lease periodically from now on. Its run was stored with this owner, or is being stored."""
        self._leases.add(self)

    def renew(self) -> None:
        """Submit a write of the run as it is now. The write also renews the lease."""
        if not (self.closed or self.lost):
            self._submit(self.snapshot(self.owner))

    async def holds(self) -> bool:
        """Return whether this process may still send. Waits for the store only if the lease was not renewed in time.

        If the store fails or hangs, the run may go on, because no other process can take the run over in such a store either. If this
        process was paused while it waited for the store, it asks the store again.
        """
        leases = self._leases
        while leases.clock() >= self._valid_until and not (self.lost or self.closed):
            asked = leases.clock()
            self.renew()
            with suppress(ServiceError, TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await self.written()
            if (now := leases.clock()) - asked < leases.lease_s:
                self._valid_until = max(self._valid_until, now + leases.lease_s / _RENEWALS)  # the time at which to ask the store again
        return not self.lost

    def written(self) -> "asyncio.Future[Any]":
        """Return a future that is done when the latest write has ended, and has its error if it failed. It may be cancelled."""
        assert self._latest is not None
        writing = asyncio.wrap_future(self._latest)
        writing.add_done_callback(lambda done: done.exception())  # so that asyncio does not log the error, which `_done` handles
        return asyncio.shield(writing)

    def leave(self) -> None:
        """End the lease without a write."""
        self.ended.set()
        self.closed = True
        self._leases.forget(self)

    def close(self) -> None:
        """End the lease, and submit a last write of the run, which names no owner."""
        last = not (self.closed or self.lost)
        self.leave()
        if last:
            self._submit(self.snapshot(""))

    def abandon(self) -> None:
        """End the lease and delete the stored run, which cannot be continued: its client never gets its id."""
        self.leave()
        with suppress(ServiceError):
            self._latest = self._leases.store.submit(self.erase)
            self._latest.add_done_callback(Future.exception)

    def lose(self) -> None:
        """End the lease because another process, or another lease of this process, has taken the run over."""
        if not (self.lost or self.closed):
            self.lost = True
            self._leases.forget(self)
            self.on_loss()

    def write(self, engine: StateEngine, put: Put) -> None:
        """Write the run with `put`. Runs on the store's thread. Raises DocumentMoved if the stored document names another owner.

        The owner is compared, not a version, because it is unknown whether a failed write has changed the version.
        """
        for left in reversed(range(_TRIES)):
            version = 0
            with suppress(StateNotFound):
                found = engine.read(self.tenant, self.kind, self.id)
                version = found.version
                if owner_of(found.body) != self.owner:
                    raise document_moved(self.kind, self.id, version, 0)
            try:
                put(engine, version)
                break
            except DocumentMoved:
                if not left:
                    raise

    def _submit(self, put: Put) -> None:
        """Submit a write. The store carries out writes in the order in which they were submitted."""
        leases, began = self._leases, self._leases.clock()
        try:
            self._latest = leases.store.submit(lambda engine: self.write(engine, put))
        except ServiceError as error:
            self._latest = Future()
            self._latest.set_exception(error)
        loop = asyncio.get_running_loop()
        self._latest.add_done_callback(lambda done: _on(loop, self._done, done, began))

    def _done(self, done: "Future[None]", began: float) -> None:
        error = done.exception()
        if error is None:
            self._valid_until = began + self._leases.lease_s
        elif isinstance(error, DocumentMoved | StateNotFound):
            self.lose()
        else:
            self._leases.count(error.code if isinstance(error, ServiceError) else "error")


class StreamLease(Lease):
    """The right of one stream of this process to send a run."""

    kind = RUN_KIND

    def __init__(self, leases: "Leases", start: RunStart, progress: Progress, *, runs_s: float) -> None:
        """`runs_s`: the longest duration of the stream, in seconds."""
        super().__init__(leases, start.tenant, start.id)
        self.start, self.progress = start, progress
        self._runs_s = runs_s
        self.closed = progress.status == "completed"
        self._expires = math.inf  # expiry of the last written document, in Unix time; only the store's thread uses it
        self._written = progress.n_tokens

    async def begun(self, *, patient: bool) -> bool:
        """Wait for the first write, and return whether the run can be continued later.

        If `patient`, wait until the write has ended, and raise the store's error if it failed. Otherwise wait for at most `_WRITE_S`.
        Return False if the write failed, and True if it has not ended, since it will probably succeed.
        """
        try:
            async with asyncio.timeout(None if patient else _WRITE_S):
                await self.written()
        except TimeoutError:
            pass
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

    def close(self, status: Status = "in_progress") -> None:
        """End the lease, and write the run's status. With status `in_progress`, the run has not ended, and any process may continue it."""
        if not (self.closed or self.lost):
            self.progress.status = status
        super().close()

    def erase(self, engine: StateEngine) -> None:
        for kind in (RUN_KIND, REQUEST_KIND):
            with suppress(StateNotFound):
                engine.erase(self.tenant, kind, self.id, None)

    def snapshot(self, owner: str) -> Put:
        """See `Lease`. The run's request is written too by the first write, and if the store has no document of the run. The function
        raises StateNotFound if the document is missing and may have expired.
        """
        start, quota, now = self.start, self._leases.quota, time.time()
        key: dict[str, Any] = {"id": self.id, "tenant": self.tenant}
        run = Document(kind=RUN_KIND, **key, body=pack(start, self.progress, owner), expires=now + KEPT_S)
        # The request expires later than the run's document.
        request = Document(kind=REQUEST_KIND, **key, body=start.body, expires=now + self._runs_s + self._leases.lease_s + KEPT_S)
        self._written = self.progress.n_tokens

        def put(engine: StateEngine, version: int | None) -> None:
            if not version and time.time() >= self._expires:
                raise no_document(RUN_KIND, self.id)
            if not version or math.isinf(self._expires):
                engine.write(request, None, quota)
            engine.write(run, version, quota)
            self._expires = run.expires or math.inf

        return put


def _on(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # raised if the service has stopped and the loop is closed
        loop.call_soon_threadsafe(call, *arguments)


L = TypeVar("L", bound=Lease)


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

    def begin(self, start: RunStart, choices: int, *, runs_s: float) -> StreamLease:
        """Return the lease of a new stream with so many choices, and begin to write the run to the store. `runs_s`: the longest duration of
        the stream, in seconds."""
        lease = StreamLease(self, start, Progress(tokens=[[] for _ in range(choices)], ended=[False] * choices), runs_s=runs_s)
        lease.begin()
        lease.renew()
        return lease

    async def take_over(self, tenant: str, run: str, *, runs_s: float) -> StreamLease:
        """Return the lease of a stored stream, after writing this process into its document as the owner. The lease of a completed stream
        is closed already: nothing is written.

        Raises RunNotFound if the tenant has no such run, or DocumentMoved if another process takes it over at the same time.
        """

        def found(engine: StateEngine) -> tuple[StreamLease, int]:
            stored, request = engine.read(tenant, RUN_KIND, run), engine.read(tenant, REQUEST_KIND, run)
            start, progress = unpack(run, tenant, stored.body, request.body)
            if progress.status != "completed":
                progress.status = "in_progress"
            return StreamLease(self, start, progress, runs_s=runs_s), stored.version

        try:
            return await self.take(found)
        except StateNotFound:
            raise RunNotFound(
                f"there is no run {run}: a stream can be continued for {KEPT_S:g} s after its end; send the request again", param="run"
            ) from None

    async def take(self, found: Callable[[StateEngine], tuple[L, int]]) -> L:
        """Take over a stored run of another owner. `found`, called on the store's thread, returns its lease and its document's version.

        Raises DocumentMoved if another process takes the run over at the same time.
        """

        def take(engine: StateEngine) -> L:
            lease, version = found(engine)
            if not lease.closed:
                lease.snapshot(lease.owner)(engine, version)
            return lease

        lease = await self.store.call(take)
        if lease.closed:
            return lease
        if (here := self.open.get(lease.id)) is not None:
            here.lose()
            with suppress(TimeoutError):  # the earlier stream counts towards the tenant's limit until it ends
                async with asyncio.timeout(_LEAVES_S):
                    await here.ended.wait()
        lease.begin()
        return lease

    def add(self, lease: Lease) -> None:
        self.open[lease.id] = lease
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

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
            lease.close()

    async def _renew(self) -> None:
        """Renew all leases periodically, until no lease is left."""
        while self.open:
            await asyncio.sleep(self.lease_s / _RENEWALS)
            for lease in list(self.open.values()):
                lease.renew()
