"""Rows of state memory, on a host or a device: zeroed, swapped without copies, filled up from the end, never mistaken for each other."""

from collections.abc import Callable

import numpy as np
import pytest

from export import contract
from service.generation.gpu.row_copies import RowCopies
from service.generation.gpu.session import DeviceStates
from service.generation.session import HostStates, States
from service.generation.slots import Row, Slots, WrongOwner
from service.runtime.onnx import CPU, CUDA, DEVICES
from tests.gpu import ON_A_GPU

DECODER = contract.Decoder(
    states=(contract.StateTensor(name="state_0_S", shape=(2, 3)), contract.StateTensor(name="state_0_n", shape=(1,), dtype="int64")),
    takes_positions=False,
    exact=True,
)


class Memory:
    """As much of a session as slots need."""

    def __init__(self, states: Callable[[int], States]) -> None:
        self.states = states


@pytest.fixture(params=["host", CPU, pytest.param(CUDA, marks=ON_A_GPU)])
def memory(request: pytest.FixtureRequest) -> Memory:
    if request.param == "host":
        return Memory(lambda rows: HostStates(DECODER, rows))
    if request.param == CPU:
        request.getfixturevalue("afar")
    copies = RowCopies(DECODER, request.param)
    return Memory(lambda rows: DeviceStates(DECODER, rows, copies, DEVICES[request.param]))


def stepped(slots: Slots[str]) -> None:
    """A step that adds one to every number of every row in use."""
    states, out = slots.sets
    for row in range(len(slots)):
        out.put(row, [state + 1 for state in states.read(row, 0)])
    slots.stepped(np.ones(len(slots), np.int64))


def test_a_row_begins_with_zeros_whoever_had_it_before(memory: Memory) -> None:
    slots: Slots[str] = Slots(memory, 1)
    slots.add("a")
    stepped(slots)
    slots.remove(0)
    slots.add("b")
    assert [array.tolist() for array in slots.state(0)] == [np.zeros((2, 3)).tolist(), [0]]
    slots.check(["b"], [0])


def test_what_a_step_writes_is_what_the_next_one_reads_and_nothing_is_copied(memory: Memory) -> None:
    slots: Slots[str] = Slots(memory, 3)
    slots.add("a")
    slots.add("b")
    first = slots.sets
    stepped(slots)
    assert slots.sets == first[::-1]
    stepped(slots)
    assert slots.sets == first, "two sets of memory that change places"
    assert slots.state(1)[1].tolist() == [2]


def test_the_last_row_takes_the_place_of_one_that_leaves(memory: Memory) -> None:
    slots: Slots[str] = Slots(memory, 3)
    for name in "abc":
        slots.add(name)
        stepped(slots)
    assert slots.remove(0) == 2
    assert slots.owners == ["c", "b"]
    slots.check(["c", "b"], [1, 2])
    assert [slots.state(row)[1].tolist() for row in (0, 1)] == [[1], [2]]
    assert slots.remove(1) is None


def test_a_row_goes_on_from_one_of_other_slots_which_stays_as_it_is(memory: Memory) -> None:
    ours: Slots[str] = Slots(memory, 3)
    theirs: Slots[str] = Slots(memory, 2)
    ours.add("a")
    for name in "bc":
        theirs.add(name)
        stepped(theirs)
    for name in "de":  # two runs that had one prompt
        ours.add(name, Row(theirs, 0), 2)
    stepped(ours)
    ours.check(["a", "d", "e"], [1, 3, 3])
    assert [ours.state(row)[0].tolist() for row in range(3)] == [np.full((2, 3), n).tolist() for n in (1, 3, 3)]
    assert [theirs.state(row)[1].tolist() for row in (0, 1)] == [[2], [1]]


@pytest.mark.parametrize(("owner", "position", "words"), [("b", 1, "another run"), ("a", 0, "at position 1"), ("a", 2, "at position 1")])
def test_a_row_that_is_not_what_its_owner_takes_it_for_is_found_out(memory: Memory, owner: str, position: int, words: str) -> None:
    slots: Slots[str] = Slots(memory, 2)
    slots.add("a")
    stepped(slots)
    with pytest.raises(WrongOwner, match=words):
        slots.check([owner], [position])


def test_a_step_is_undone_also_for_a_row_that_was_moved_since(memory: Memory) -> None:
    slots: Slots[str] = Slots(memory, 3)
    for owner in "abc":
        slots.add(owner, [np.full((2, 3), ord(owner), np.float32), np.array([7])], position=7)
    stepped(slots)
    assert slots.remove(0, undoable=True) == 2
    assert [array.max() for array in slots.before(0)] == [ord("c"), 7]
    slots.take_back(0, 1)
    slots.check(["c", "b"], [7, 8])
    assert [[array.max() for array in slots.state(row)] for row in (0, 1)] == [[ord("c"), 7], [ord("b") + 1, 8]]
