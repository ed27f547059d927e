"""Loads the states that an engine's runs begin with, and stores the states of its runs: kept states and checkpoints."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import numpy as np

from export import contract
from service.errors import InvalidRequest, RuntimeFailed, ServiceError
from service.generation.request import GenerationRequest
from service.generation.saved.packing import Packing
from service.generation.saved.writer import NO_QUOTA, Writer
from service.generation.sequence import Sequence
from service.generation.state import State
from service.runtime.lru import Lru
from service.states.engine import StateEngine
from service.states.record import Document, Keep, StateRecord, StateReference
from service.states.store import Store
from service.states.validity import not_finite

_CHECKPOINT = "checkpoint"  # the kind of a document that contains a checkpoint
_CHECKPOINT_S = 600.0  # seconds after which the checkpoint of a lost run expires
_MOST_WRITING = 8

Stored = Callable[[ServiceError | None], None]


class StateKeeper:
    """Loads and stores states for one decoder's engine. The most recently used states stay in memory, up to `hot_bytes` in total."""

    def __init__(
        self, store: Store, decoder: contract.Decoder, *, vocab_size: int, fingerprint: str, numerics: str, hot_bytes: int
    ) -> None:
        """`fingerprint` identifies the bundle, and `numerics` the arithmetic of this machine (see `states/numerics.py`)."""
        self._store = store
        self.packing = Packing(decoder, vocab_size=vocab_size, fingerprint=fingerprint, numerics=numerics)
        self._hot: Lru[str, State] = Lru(hot_bytes)  # by id; used on the store's thread
        self._checkpoints = Writer(store, _MOST_WRITING, "a checkpoint")
        self._written: set[str] = set()  # ids of the checkpoints of runs that have not ended

    async def load(self, requests: Iterable[GenerationRequest]) -> tuple[dict[StateReference, State], dict[str, State]]:
        """Return the states that the requests continue, by reference, and the newest checkpoints of lost runs that they continue, by
        checkpoint id. No checkpoint is returned for a run that must compute the log-probabilities of its prompt, because such a run begins
        again.

        Raises InvalidRequest, StateNotFound, StateGone or StoreFailed.
        """
        states: dict[StateReference, State] = {}
        checkpoints: dict[str, State] = {}
        for request in requests:
            if request.start is not None and request.start not in states:
                states[request.start] = await self.state_of(request.start)
            begin = 0 if request.start is None else states[request.start].position
            if not (request.reopened and request.checkpoint and request.prompt_logprobs is None):
                continue
            if (checkpoint := await self.checkpoint_of(request, begin)) is not None:
                checkpoints[request.checkpoint] = checkpoint
        return states, checkpoints

    async def state_of(self, reference: StateReference) -> State:
        """Return a stored state. Raises StateNotFound, StateGone, StoreFailed, or InvalidRequest if this engine cannot continue it."""

        def found(engine: StateEngine) -> State:
            record = engine.use(reference.tenant, reference.id)
            self._check(record, reference)
            if (state := self._hot.get(record.id)) is None:
                state = self.packing.unpack(engine.blob(reference.tenant, record.id))
                self._hot.put(record.id, state, state.size_bytes)
            return state

        return await self._store.call(found)

    def keep(self, keep: Keep, state: State, origin: State | None, fed: tuple[int, ...], stored: Stored) -> None:
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
            packed = packing.pack(whole, id=record.id, model=record.model, parent=record.parent, created=record.created)
            kept = engine.put(record, packed, ids=ids, quota=keep.quota, name=keep.name, key=keep.key)
            self._hot.put(kept.id, whole, whole.size_bytes)
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
        return self._checkpoints.has_room

    def checkpoint(self, run: Sequence, state: State) -> None:
        """Begin to write a checkpoint of the run, which has `state` now.

        Does not wait, so the engine's thread may call it. Errors are only logged, because without a checkpoint the tokens of a lost run can
        be fed again.
        """
        id, tenant = run.request.checkpoint, _apart(run.request.tenant)
        whole = self.packing.whole(state, run.marked, run.fed_since(run.marked))

        def write(engine: StateEngine) -> None:
            now = time.time()
            body = self.packing.seal(id, whole, now)
            engine.write(Document(kind=_CHECKPOINT, id=id, tenant=tenant, body=body, expires=now + _CHECKPOINT_S), None, NO_QUOTA)

        self._written.add(id)
        self._checkpoints.begin(write)
        run.marked, run.saved_at = replace(whole, tensors=(), logits=None), run.position

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


def _apart(tenant: str) -> str:
    """Return the tenant under which checkpoints are stored. No API key can have this tenant, so checkpoints do not count against the quota
    of the real tenant's states.
    """
    return f"{tenant}/checkpoints"


def _told(error: BaseException | None) -> ServiceError | None:
    return error if error is None or isinstance(error, ServiceError) else RuntimeFailed(f"the state could not be stored: {error}")
