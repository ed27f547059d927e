"""The check of names accepts every linearizable history of a register with compare-and-set, and no other."""

import pytest

from tests.simulation.history import NameOperation, wrong_name

SEEN = NameOperation(0, 1, None, 0)
FIRST = NameOperation(1, 2, 0, 1, "a")
SECOND = NameOperation(3, 4, 1, 2, "b")


def test_a_register_is_found_right() -> None:
    lost = NameOperation(3, 4.5, 1, None, "c", failed=True)  # two movers: one wins
    read = NameOperation(5, 6, None, 2, "b")
    unknown = NameOperation(6, 7, 2, None, "d")  # its answer was lost; it has taken effect
    later = NameOperation(8, 9, 3, 4, "e")
    assert not list(wrong_name([SEEN, FIRST, SECOND, lost, read]))
    assert not list(wrong_name([SEEN, FIRST, SECOND, lost, read, unknown]))
    assert not list(wrong_name([SEEN, FIRST, SECOND, lost, read, unknown, later]))
    late = NameOperation(8, 9, 2, None, "e", failed=True)  # refused, because the operation of the lost answer has taken effect
    assert not list(wrong_name([SEEN, FIRST, SECOND, read, unknown, late]))
    overlapping = NameOperation(3.5, 6, None, 1, "a")  # it began before the second move had ended
    assert not list(wrong_name([SEEN, FIRST, SECOND, overlapping]))


@pytest.mark.parametrize(
    ("operations", "why"),
    [
        ([FIRST, NameOperation(1, 3, 0, 1, "b")], "two moves gave version 1"),
        ([FIRST, NameOperation(3, 4, 0, 2, "b")], "a move from version 0 gave version 2"),
        ([FIRST, NameOperation(3, 4, None, 1, "b")], "points to b, and was written with a"),
        ([FIRST, SECOND, NameOperation(5, 6, None, 1, "a")], "shows an older version"),
        ([SEEN, SECOND], "nobody has written version 1"),
        ([NameOperation(0, 0.5, None, 1, "a"), FIRST], "before it was written"),
        ([FIRST, NameOperation(3, 4, 1, None, "b", failed=True)], "although the version was 1 all the time"),
    ],
    ids=["two winners", "a step of two", "another state", "an old value", "from nowhere", "from the future", "no winner"],
)
def test_what_no_register_shows_is_found(operations: list[NameOperation], why: str) -> None:
    assert any(why in wrong for wrong in wrong_name(operations))
