"""Whose turn it is."""

from service.runtime.fairness import FairOrder


def test_large_work_is_not_passed_for_good() -> None:
    fair = FairOrder()
    large = fair.tag("a", 100)
    passed = 0
    while (tag := fair.tag("b", 1)) < large:
        fair.served(tag)
        passed += 1
    assert passed == 99


def test_who_comes_late_gets_no_more_than_who_was_there() -> None:
    fair = FairOrder()
    fair.served(fair.tag("a", 1000))
    assert fair.tag("b", 1) == 1001


def test_clients_that_have_left_are_forgotten() -> None:
    fair = FairOrder()
    for n in range(10_000):
        fair.served(fair.tag(str(n), 1))
    assert len(fair._ends) < 1000


def test_clients_take_turns_one_after_the_other() -> None:
    """Two equal requests of eight pieces, and a third that is sent when the first is served: none of it passes the second."""
    fair = FairOrder(turn=10)
    first, second = [fair.tag("a", 1) for _ in range(8)], [fair.tag("b", 1) for _ in range(8)]
    assert set(first + second) == {10}
    fair.served(first[0])
    assert fair.tag("c", 1) == 20


def test_a_large_request_keeps_others_waiting_for_one_turn() -> None:
    fair = FairOrder(turn=10)
    large = [fair.tag("a", 1) for _ in range(100)]
    fair.served(large[0])
    small = fair.tag("b", 1)
    assert sum(tag <= small for tag in large) == 20, "the turn that has begun, and one beside b's"
