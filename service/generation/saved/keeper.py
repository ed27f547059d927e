"""Loads the states that requests continue, and stores the states that requests ask to keep, for the engine of one decoder."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import numpy as np

from export import contract
from service.errors import InvalidRequest, RuntimeFailed, ServiceError
from service.generation.request import GenerationRequest
from service.generation.saved.packing import Packing
from service.generation.state import State
from service.states.engine import StateEngine
from service.states.record import Document, Keep, Quota, StateRecord, StateReference
from service.states.store import Store
from service.states.validity import not_finite

_CHECKPOINT = "checkpoint"  # the kind of a document that contains a checkpoint
_CHECKPOINT_S = 600.0  # seconds after which the checkpoint of a lost run expires
_MOST_WRITING = 8
_NO_QUOTA = Quota(states=2**31, size=2**62)  # no limit is needed, because an engine has at most one checkpoint for each slot

log = logging.getLogger("attnserve")

Stored = Callable[[ServiceError | None], None]


class StateKeeper:
    """Loads and stores states for one decoder's engine. The most recently used states stay in memory, up to `hot_bytes` in total."""

    def __init__(
        self, store: Store, decoder: contract.Decoder, *, vocab_size: int, fingerprint: str, numerics: str, hot_bytes: int
    ) -> None:
        """`fingerprint` identifies the bundle, and `numerics` the arithmetic of this machine (see `states/numerics.py`)."""
        self._store = store
        self.packing = Packing(decoder, vocab_size=vocab_size, fingerprint=fingerprint, numerics=numerics)
        self._hot_bytes = hot_bytes
        self._lock = threading.Lock()
        self._hot: OrderedDict[str, State] = OrderedDict()  # state id -> state, least recently used first
        self._held = 0  # size of the states in `_hot`, in bytes
        self._writing = 0  # number of checkpoints that are being written
        self._written: set[str] = set()  # ids of the checkpoints of runs that have not ended

    async def load(self, reference: StateReference) -> State:
        """Return a stored state. Raises StateNotFound, StateGone, StoreFailed, or InvalidRequest if this engine cannot continue it."""

        def found(engine: StateEngine) -> State:
            record = engine.use(reference.tenant, reference.id)
            self._check(record, reference)
            if (hot := self._hot_state(record.id)) is not None:
                return hot
            return self.packing.unpack(engine.blob(reference.tenant, record.id))

        state = await self._store.call(found)
        self._warm(reference.id, state)
        return state

    def keep(self, keep: Keep, state: State, origin: State | None, fed: Sequence[int], stored: Stored) -> None:
        """Store `state`, which results from feeding the tokens `fed` to `origin` (None: the empty state), unless `keep.gone`. Then `stored`
        is called on any thread, with None if this succeeded, else with the error. A state with numbers that are not finite is not stored.

        Never waits, so the engine's thread may call it.
        """
        if keep.gone:
            stored(None)
            return

        def put(engine: StateEngine) -> StateRecord:
            packing = self.packing
            whole = packing.whole(state, origin, fed)
            if not whole.finite:
                raise not_finite(whole.position, began=origin is not None)
            record = replace(keep.record, position=state.position, fingerprint=packing.fingerprint, numerics=packing.numerics)
            ids = np.array(fed, "<i4").tobytes()
            kept = engine.put(record, packing.pack(record, whole), ids=ids, quota=keep.quota, name=keep.name, key=keep.key)
            self._warm(kept.id, whole)
            return kept

        def done(future: "Future[StateRecord]") -> None:
            error = future.exception()
            if error is None and future.result().id != keep.record.id:
                stored(InvalidRequest("another request with this Idempotency-Key was answered meanwhile: send the request again"))
            else:
                stored(_told(error))

        try:
            self._store.submit(put).add_done_callback(done)
        except ServiceError as error:
            stored(error)

    @property
    def has_room(self) -> bool:
        """Return whether few enough checkpoints are being written that another one may begin."""
        return self._writing < _MOST_WRITING

    def checkpoint(self, request: GenerationRequest, state: State, marked: State | None, fed: Sequence[int]) -> State:
        """Begin to write the checkpoint of a run: `state`, which results from feeding the tokens `fed` to the earlier state `marked`.
        Returns the value of `marked` for the next checkpoint.

        Does not wait, so the engine's thread may call it. Errors are only logged, because without a checkpoint the tokens of a lost run can
        be fed again.
        """
        whole, id, tenant = self.packing.whole(state, marked, fed), request.checkpoint, _apart(request.tenant)

        def write(engine: StateEngine) -> None:
            now = time.time()
            body = self.packing.seal(id, whole, now)
            engine.write(Document(kind=_CHECKPOINT, id=id, tenant=tenant, body=body, expires=now + _CHECKPOINT_S), None, _NO_QUOTA)

        with self._lock:
            self._writing += 1
            self._written.add(id)
        try:
            self._store.submit(write).add_done_callback(lambda done: self._wrote(done.exception()))
        except ServiceError as error:
            self._wrote(error)
        return replace(whole, tensors=(), logits=None)

    def _wrote(self, error: BaseException | None) -> None:
        with self._lock:
            self._writing -= 1
        if error is not None:
            log.warning("a checkpoint could not be written: %s", error)

    async def checkpoint_of(self, request: GenerationRequest, start: int) -> State | None:
        """Return the state of the run at its newest checkpoint, or None if there is no checkpoint that matches this engine and the
        request's tokens. The request's prompt begins at position `start`.
        """
        try:
            document = await self._store.call(lambda engine: engine.read(_apart(request.tenant), _CHECKPOINT, request.checkpoint))
            state = self.packing.unseal(document.body)
        except ServiceError:
            return None
        n_fed = state.position - start
        fed = (request.prompt + request.known)[: max(n_fed, 0)]
        fits = 0 < n_fed == len(fed) and state.recent[-len(fed) :] == fed[-len(state.recent) :]
        return state if fits and state.logits is not None else None

    def forget(self, request: GenerationRequest, *, erase: bool) -> None:
        """Note that a run has ended. If `erase` is True, delete its checkpoint. Else the run may continue in another process from its
        checkpoint, which stays until it expires.
        """
        with self._lock:
            if request.checkpoint not in self._written:
                return
            self._written.remove(request.checkpoint)
        if erase:
            with suppress(ServiceError):
                self._store.submit(lambda engine: engine.erase(_apart(request.tenant), _CHECKPOINT, request.checkpoint, None))

    def _check(self, record: StateRecord, reference: StateReference) -> None:
        if record.fingerprint != self.packing.fingerprint:
            raise InvalidRequest(
                f"the state {record.id} is of the bundle with fingerprint {record.fingerprint[:12]!r} (model {record.model}), and this "
                f"model's is {self.packing.fingerprint[:12]!r}: name the model that made it",
                param="state",
            )
        if reference.exact and record.numerics != self.packing.numerics:
            raise InvalidRequest(
                f"the state {record.id} was made by other arithmetic ({record.numerics}) than this one's ({self.packing.numerics}), so "
                'tokens could differ: send exact: "best_effort" to continue it all the same',
                param="exact",
            )

    def _hot_state(self, state: str) -> State | None:
        with self._lock:
            if state in self._hot:
                self._hot.move_to_end(state)
            return self._hot.get(state)

    def _warm(self, name: str, state: State) -> None:
        with self._lock:
            if name not in self._hot and state.size_bytes <= self._hot_bytes:
                self._hot[name] = state
                self._held += state.size_bytes
            while self._held > self._hot_bytes:
                _, oldest = self._hot.popitem(last=False)
                self._held -= oldest.size_bytes


def _apart(tenant: str) -> str:
    """Return the tenant under which checkpoints are stored. No API key can have this tenant, so checkpoints do not count against the quota
    of the real tenant's states.
    """
    return f"{tenant}/checkpoints"


def _told(error: BaseException | None) -> ServiceError | None:
    return error if error is None or isinstance(error, ServiceError) else RuntimeFailed(f"the state could not be stored: {error}")
