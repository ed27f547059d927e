"""States and checkpoints that runs begin with: which of them are asked for."""

from typing import Any

import numpy as np
import pytest

from service.errors import InvalidRequest
from service.generation.request import GenerationRequest
from service.generation.saved.run_states import RunStates
from service.generation.state import State
from service.states.record import StateReference
from tests.service.generation.test_engine import ask


class Keeper:
    """Has a state at position 7 for every reference, and no checkpoint. Notes what it is asked for."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.looked: list[tuple[str, int]] = []

    async def load(self, reference: StateReference) -> State:
        self.loaded.append(reference.id)
        return State(tensors=(), position=7, logits=np.zeros(2, np.float32), fingerprint="f")

    async def checkpoint_of(self, request: GenerationRequest, start: int) -> None:
        self.looked.append((request.checkpoint, start))


async def test_checkpoints_are_looked_for_where_the_prompt_begins() -> None:
    keeper: Any = Keeper()
    start = StateReference("t", "s")
    states, _ = await RunStates(keeper).load(
        [
            ask(5, start=start, checkpoint="a", reopened=True),
            ask(6, start=start, checkpoint="b", reopened=True),
            ask(5, checkpoint="c", reopened=True),
            ask(5, checkpoint="d"),
            ask(5, checkpoint="e", reopened=True, prompt_logprobs=1),
        ]
    )
    assert list(states) == [start]
    assert keeper.loaded == ["s"], "two runs share the state"
    assert keeper.looked == [("a", 7), ("b", 7), ("c", 0)]


def test_without_a_store_there_is_no_room_and_no_state_can_be_kept() -> None:
    assert not RunStates(None).has_room
    with pytest.raises(InvalidRequest, match="no store of states"):
        RunStates(None).check(ask(5, keep=object()))
