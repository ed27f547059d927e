"""Loads the states that requests continue, and stores the states that they ask to keep, for the engine of one decoder."""

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
from service.generation.snapshot import Snapshot, State
from service.states.blob import MOST_RECENT, Blob, pack, unpack
from service.states.engine import StateEngine
from service.states.record import Document, Keep, Quota, StateRecord, StateReference
from service.states.store import Store

_CHECKPOINT = "checkpoint"  # kind of document
_CHECKPOINT_S = 3_600.0  # after which the checkpoint of a lost run expires
_MOST_WRITING = 8
_NO_QUOTA = Quota(states=2**31, size=2**62)  # an engine has at most one checkpoint for each slot

log = logging.getLogger("attnserve")

Stored = Callable[[ServiceError | None], None]


class StateKeeper:
    """The way between one decoder's engine and the store. The states used last stay in memory: `hot_bytes` at most."""

    def __init__(
        self, store: Store, decoder: contract.Decoder, *, vocab_size: int, fingerprint: str, numerics: str, hot_bytes: int
    ) -> None:
        """`fingerprint` is the bundle's, `numerics` that of this machine's arithmetic."""
        self._store = store
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._numerics = numerics
        self._hot_bytes = hot_bytes
        self._lock = threading.Lock()
        self._hot: OrderedDict[str, State] = OrderedDict()  # by id, least recently used first
        self._held = 0  # bytes of `_hot`
        self._writing = 0  # checkpoints that are being written
        self._written: set[str] = set()  # ids of the checkpoints of runs that have not ended

    async def load(self, reference: StateReference) -> State:
        """Return a stored state. Raises StateNotFound, StateGone, StoreFailed, or InvalidRequest if this engine cannot continue it."""

        def found(engine: StateEngine) -> State:
            record = engine.use(reference.tenant, reference.id)
            self._check(record, reference)
            if (hot := self._hot_state(record.id)) is not None:
                return hot
            return self._unpacked(engine.blob(reference.tenant, record.id))

        state = await self._store.call(found)
        self._warm(reference.id, state)
        return state

    def keep(self, keep: Keep, state: State, origin: State | None, fed: Sequence[int], stored: Stored) -> None:
        """Store `state`, which is `origin` (None: the empty state) after the tokens `fed`, and call `stored` from any thread.

        Never waits, so the engine's thread may call it.
        """

        def put(engine: StateEngine) -> StateRecord:
            whole = replace(state, seen=self._seen(origin, fed), recent=_recent(origin, fed))
            record = replace(keep.record, position=state.position, fingerprint=self._fingerprint, numerics=self._numerics)
            kept = engine.put(
                record, self._packed(record, whole), ids=np.array(fed, "<i4").tobytes(), quota=keep.quota, name=keep.name, key=keep.key
            )
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
        """Whether the store keeps up with the checkpoints."""
        return self._writing < _MOST_WRITING

    def checkpoint(self, request: GenerationRequest, state: State, origin: State | None, fed: Sequence[int]) -> None:
        """Begin to write the checkpoint of a run: `state`, which is `origin` after the tokens `fed`. Never waits, so the engine's thread
        may call it. Errors are logged: without a checkpoint, the tokens of a lost run are fed again."""

        def write(engine: StateEngine) -> None:
            now = time.time()
            record = StateRecord(
                id=request.checkpoint,
                tenant=request.tenant,
                model="checkpoint",
                fingerprint=self._fingerprint,
                numerics=self._numerics,
                position=state.position,
                parent=None,
                origin="continuation",
                created=now,
                used=now,
            )
            whole = replace(state, seen=self._seen(origin, fed), recent=_recent(origin, fed))
            body = self._packed(record, whole)
            document = Document(kind=_CHECKPOINT, id=record.id, tenant=record.tenant, body=body, expires=now + _CHECKPOINT_S)
            engine.write(document, None, _NO_QUOTA)

        with self._lock:
            self._writing += 1
            self._written.add(request.checkpoint)
        try:
            self._store.submit(write).add_done_callback(lambda done: self._wrote(done.exception()))
        except ServiceError as error:
            self._wrote(error)

    def _wrote(self, error: BaseException | None) -> None:
        with self._lock:
            self._writing -= 1
        if error is not None:
            log.warning("a checkpoint could not be written: %s", error)

    async def checkpoint_of(self, request: GenerationRequest, start: int) -> Snapshot | None:
        """Return the run at its newest checkpoint, or None if there is none that fits this engine and the tokens of the request, which
        begins at position `start`."""
        try:
            document = await self._store.call(lambda engine: engine.read(request.tenant, _CHECKPOINT, request.checkpoint))
            state = self._unpacked(document.body)
        except ServiceError:
            return None
        snapshot = Snapshot(request=request, state=state, completion=request.known, start=start)
        fed = (request.prompt + request.known)[: max(snapshot.fed, 0)]
        fits = 0 < snapshot.fed == len(fed) and state.recent[-len(fed) :] == fed[-len(state.recent) :]
        return snapshot if fits else None

    def forget(self, request: GenerationRequest) -> None:
        """Delete the checkpoint of a run that has ended."""
        with self._lock:
            if request.checkpoint not in self._written:
                return
            self._written.remove(request.checkpoint)
        with suppress(ServiceError):
            self._store.submit(lambda engine: engine.erase(request.tenant, _CHECKPOINT, request.checkpoint, None))

    def _check(self, record: StateRecord, reference: StateReference) -> None:
        if record.fingerprint != self._fingerprint:
            raise InvalidRequest(
                f"the state {record.id} is of the bundle with fingerprint {record.fingerprint[:12]!r} (model {record.model}), and this "
                f"model's is {self._fingerprint[:12]!r}: name the model that made it",
                param="state",
            )
        if reference.exact and record.numerics != self._numerics:
            raise InvalidRequest(
                f"the state {record.id} was made by other arithmetic ({record.numerics}) than this one's ({self._numerics}), so tokens "
                'could differ: send exact: "best_effort" to continue it all the same',
                param="exact",
            )

    def _packed(self, record: StateRecord, state: State) -> bytes:
        assert state.logits is not None
        assert state.seen is not None
        blob = Blob(
            tensors=state.tensors,
            logits=state.logits,
            seen=state.seen,
            recent=state.recent,
            position=state.position,
            model=record.model,
            fingerprint=record.fingerprint,
            numerics=record.numerics,
            id=record.id,
            parent=record.parent,
            created=record.created,
        )
        return pack(blob, [tensor.name for tensor in self._decoder.states])

    def _unpacked(self, packed: bytes) -> State:
        blob = unpack(packed, self._decoder, self._vocab_size, self._fingerprint)
        return State(
            tensors=blob.tensors,
            position=blob.position,
            logits=blob.logits,
            fingerprint=blob.fingerprint,
            seen=blob.seen,
            recent=blob.recent,
        )

    def _seen(self, origin: State | None, fed: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        bits = np.zeros(self._vocab_size, np.bool_)
        bits[np.array(fed, np.int64)] = True
        packed = np.packbits(bits, bitorder="little")
        return packed if origin is None or origin.seen is None else packed | origin.seen

    def _hot_state(self, state: str) -> State | None:
        with self._lock:
            if state in self._hot:
                self._hot.move_to_end(state)
            return self._hot.get(state)

    def _warm(self, name: str, state: State) -> None:
        size = sum(tensor.nbytes for tensor in state.tensors) + 4 * self._vocab_size
        with self._lock:
            if name not in self._hot and size <= self._hot_bytes:
                self._hot[name] = state
                self._held += size
            while self._held > self._hot_bytes:
                self._hot.popitem(last=False)
                self._held -= size  # all states of a decoder have the same size


def _recent(origin: State | None, fed: Sequence[int]) -> tuple[int, ...]:
    return (*(() if origin is None else origin.recent), *fed[-MOST_RECENT:])[-MOST_RECENT:]


def _told(error: BaseException | None) -> ServiceError | None:
    return error if error is None or isinstance(error, ServiceError) else RuntimeFailed(f"the state could not be stored: {error}")
