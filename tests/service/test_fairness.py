"""Whose turn it is."""

from service.fairness import FairOrder


def order(*work: tuple[str, float]) -> list[str]:
    """Clients in their turns, of work that came at once."""
    fair = FairOrder()
    return [client for _, _, client in sorted((fair.tag(client, size), at, client) for at, (client, size) in enumerate(work))]


def test_clients_take_turns_however_much_one_has_sent() -> None:
    assert order(*[("a", 1)] * 4, *[("b", 1)] * 2) == ["a", "b", "a", "b", "a", "a"]


def test_small_work_passes_large_work() -> None:
    assert order(("a", 100), ("b", 1), ("b", 1)) == ["b", "b", "a"]


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
