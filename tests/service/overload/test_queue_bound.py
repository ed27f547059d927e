"""Which requests a queue refuses, with the time set by the tests."""

import pytest

from service.errors import Overloaded, QueueTooLong
from service.overload.queue_bound import QueueBound
from service.overload.refusals import ReadDelay, RefusalDelay

MOST_S, BUSY_S = 1.0, 0.1


def taken(bound: QueueBound, now: float, queue_s: float) -> bool:
    try:
        bound.check(now, queue_s, BUSY_S)
    except QueueTooLong:
        return False
    return True


def test_a_burst_may_fill_the_queue_up_to_its_bound() -> None:
    bound = QueueBound(MOST_S)
    assert [taken(bound, 0.0, queue_s / 10) for queue_s in range(13)] == [True] * 11 + [False] * 2


def test_from_a_refusal_on_the_queue_keeps_the_runtime_busy_and_is_no_longer() -> None:
    bound = QueueBound(MOST_S)
    assert not taken(bound, 0.0, 1.1)
    assert not taken(bound, 0.1, 0.5)
    assert taken(bound, 0.2, 0.1)
    assert taken(bound, 0.2, 0.0)


def test_a_second_without_a_refusal_ends_that() -> None:
    bound = QueueBound(MOST_S)
    assert not taken(bound, 0.0, 1.1)
    assert not taken(bound, 0.5, 0.9), "which counts from here again"
    assert bound.overloaded(1.4)
    assert not bound.overloaded(1.5)
    assert taken(bound, 1.5, 0.9)


def test_a_runtime_that_is_slower_than_the_bound_does_not_raise_it() -> None:
    bound = QueueBound(MOST_S)
    with pytest.raises(QueueTooLong):
        bound.check(0.0, 5.0, 10.0)
    with pytest.raises(QueueTooLong, match=r"needs about 1.50 s and may need 1.00 s") as refused:
        bound.check(0.1, 1.5, 10.0)
    assert 1.5 <= refused.value.retry_after_s <= 1.65, "and up to a tenth more, at random"


def test_work_that_comes_far_faster_than_it_is_done_shortens_the_queue_before_it_is_full() -> None:
    bound = QueueBound(MOST_S)
    for n in range(64):  # each of twice the work that can be done meanwhile
        assert taken(bound, n / 64, 0.5) == (n < 30), "three times ten of them"
        bound.arrivals.arrived(n / 64, 2 / 64)
    assert taken(bound, 1.0, 0.1), "what keeps the runtime busy"
    with pytest.raises(QueueTooLong, match=r"may need 0.10 s") as refused:
        bound.check(1.0, 0.2, BUSY_S)
    assert 1.0 <= refused.value.retry_after_s <= 1.1


def test_when_it_comes_slower_again_the_queue_may_be_as_long_as_before() -> None:
    bound = QueueBound(MOST_S)
    for n in range(64):
        bound.arrivals.arrived(n / 64, 2 / 64)
    assert not taken(bound, 1.0, 0.9)
    for n in range(64, 80):
        bound.arrivals.started(1 / 64)
        bound.arrivals.arrived(n / 64, 1 / 64)
    assert taken(bound, 1.25, 0.9)


def test_few_requests_or_all_at_once_are_no_sign_of_overload() -> None:
    bound = QueueBound(MOST_S)
    for n in range(5):  # more work than time, but so few that chance may have brought them
        bound.arrivals.arrived(n / 10, 0.5)
    assert taken(bound, 0.5, 0.9)
    for _ in range(200):
        bound.arrivals.arrived(0.6, 0.01)
    assert taken(bound, 0.6, 0.9)


def late(read: ReadDelay, now: float, waited_s: float) -> bool:
    try:
        read.check(now, waited_s)
    except Overloaded:
        return True
    return False


def test_requests_that_were_held_up_once_are_taken() -> None:
    """A process that stood still for five seconds reads all of them within the next one."""
    read = ReadDelay(MOST_S)
    assert not any(late(read, 5.0 + n / 10, 5.0 - n / 10) for n in range(10))


def test_requests_that_are_late_all_the_time_are_refused_until_one_is_not() -> None:
    read = ReadDelay(MOST_S)
    assert [late(read, now, 1.5) for now in (0.0, 0.9, 1.1, 2.0)] == [False, False, True, True]
    assert not late(read, 2.1, 1.0)
    assert [late(read, now, 1.5) for now in (2.2, 3.1, 3.3)] == [False, False, True]


def test_refusals_are_held_back_the_longer_the_more_there_are() -> None:
    delay = RefusalDelay()
    assert delay.delay_s(0.0) < 0.01
    delays = [delay.delay_s(n / 1000) for n in range(1000)]
    assert delays == sorted(delays)
    assert delays[-1] == 1.0
    assert delay.delay_s(6.0) < 0.05
