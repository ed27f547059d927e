"""Rows of state memory: zeroed, swapped without copies, filled up from the end, and never mistaken for each other."""

import numpy as np
import pytest

from export import contract
from service.generation.slots import Slots, WrongOwner

DECODER = contract.Decoder(
    states=(contract.StateTensor(name="state_0_S", shape=(2, 3)), contract.StateTensor(name="state_0_n", shape=(1,), dtype="int64")),
    takes_positions=False,
    exact=True,
)


def stepped(slots: Slots[str]) -> None:
    """A step that adds one to every number of every row in use."""
    states, out = slots.views()
    for before, after in zip(states, out, strict=True):
        after[:] = before + 1
    slots.stepped(np.ones(len(slots), np.int64))


def test_a_row_begins_with_zeros_whoever_had_it_before() -> None:
    slots: Slots[str] = Slots(DECODER, 1)
    slots.add("a")
    stepped(slots)
    slots.remove(0)
    slots.add("b")
    assert [array.tolist() for array in slots.state(0)] == [np.zeros((2, 3)).tolist(), [0]]
    slots.check(["b"], [0])


def test_what_a_step_writes_is_what_the_next_one_reads_and_nothing_is_copied() -> None:
    slots: Slots[str] = Slots(DECODER, 3)
    slots.add("a")
    slots.add("b")
    first = [array.__array_interface__["data"][0] for array in slots.views()[0]]
    for _ in range(2):
        stepped(slots)
    assert [array.__array_interface__["data"][0] for array in slots.views()[0]] == first, "two sets of memory that change places"
    assert slots.state(1)[1].tolist() == [2]
    assert slots.views()[0][0].shape == (2, 2, 3)


def test_the_last_row_takes_the_place_of_one_that_leaves() -> None:
    slots: Slots[str] = Slots(DECODER, 3)
    for name in "abc":
        slots.add(name)
        stepped(slots)
    assert slots.remove(0) == 2
    assert slots.owners == ["c", "b"]
    slots.check(["c", "b"], [1, 2])
    assert slots.state(0)[1].tolist() == [1]
    assert slots.remove(1) is None


def test_a_row_goes_on_from_a_given_state() -> None:
    slots: Slots[str] = Slots(DECODER, 2)
    slots.add("a", [np.full((2, 3), 7, np.float32), np.array([7])], 7)
    stepped(slots)
    slots.check(["a"], [8])
    assert slots.state(0)[0].tolist() == np.full((2, 3), 8).tolist()


@pytest.mark.parametrize(("owner", "position", "words"), [("b", 1, "somebody else"), ("a", 0, "at position 1"), ("a", 2, "at position 1")])
def test_a_row_that_is_not_what_its_owner_takes_it_for_is_found_out(owner: str, position: int, words: str) -> None:
    slots: Slots[str] = Slots(DECODER, 2)
    slots.add("a")
    stepped(slots)
    with pytest.raises(WrongOwner, match=words):
        slots.check([owner], [position])
