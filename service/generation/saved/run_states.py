"""Loads the states that an engine's runs begin with, and stores the states of its runs: kept states and checkpoints."""

from collections.abc import Callable, Iterable

from service.errors import InvalidRequest, ServiceError
from service.generation.request import GenerationRequest
from service.generation.saved.keeper import StateKeeper
from service.generation.sequence import Sequence
from service.generation.state import State
from service.states.record import StateReference


class RunStates:
    """Loads and stores the states of an engine's runs with a StateKeeper. If `keeper` is None, requests cannot name states, and runs have
    no checkpoints.
    """

    def __init__(self, keeper: StateKeeper | None) -> None:
        self._keeper = keeper

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
                states[request.start] = await self._stored.load(request.start)
        for request in requests if self._keeper is not None else ():
            begin = 0 if request.start is None else states[request.start].position
            if not (request.reopened and request.checkpoint and request.prompt_logprobs is None):
                continue
            if (checkpoint := await self._stored.checkpoint_of(request, begin)) is not None:
                checkpoints[request.checkpoint] = checkpoint
        return states, checkpoints

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequest if the request asks to keep its state and there is no store."""
        if request.keep is not None:
            _ = self._stored

    def keep(self, sequence: Sequence, state: State, stored: Callable[[ServiceError | None], None]) -> None:
        """Store the state of a run that has ended. `stored` is called on any thread, with None if the state was stored, else with the
        error.
        """
        assert sequence.request.keep is not None
        self._stored.keep(sequence.request.keep, state, sequence.origin, sequence.request.prompt + tuple(sequence.completion), stored)

    @property
    def has_room(self) -> bool:
        """Return whether there is a store and it can take another checkpoint now."""
        return self._keeper is not None and self._keeper.has_room

    def checkpoint(self, sequence: Sequence, state: State) -> None:
        """Begin to write a checkpoint of the run."""
        sequence.marked = self._stored.checkpoint(sequence.request, state, sequence.marked, sequence.fed_since(sequence.marked))
        sequence.saved_at = sequence.position

    def forget(self, request: GenerationRequest, *, erase: bool) -> None:
        """Forget a run that has ended. If `erase` is True, delete its checkpoint."""
        if self._keeper is not None:
            self._keeper.forget(request, erase=erase)

    @property
    def _stored(self) -> StateKeeper:
        if self._keeper is None:
            raise InvalidRequest("this engine has no store of states: leave out `state` and `store_state`", param="state")
        return self._keeper
