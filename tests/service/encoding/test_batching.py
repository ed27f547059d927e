"""Which inputs share a batch: the queue alone, with a clock that the test sets."""

import math
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.encoding.batching import BatchingQueue, QueuedInput
from service.encoding.pending import PendingRequest
from service.encoding.request import EncodeTask
from service.runtime.lanes import Lane
from service.tokenization.texts import Encoded

BULK_DELAY_S = 2.0


def queue(*, max_batch_tokens: int = 512, run_cost_tokens: float = 16, short_tokens: int = 0) -> BatchingQueue:
    return BatchingQueue(max_batch_tokens, run_cost_tokens, BULK_DELAY_S, short_tokens=short_tokens)


def pending(deadline: float) -> PendingRequest:
    return PendingRequest(EncodeTask(inputs=[Encoded([1], None, 1)], outputs=("sentence_embedding",), deadline=deadline), 0.0)


def item(length: int, arrived: float = 0.0, lane: Lane = Lane.INTERACTIVE, deadline: float = math.inf) -> QueuedInput:
    return QueuedInput([1] * length, None, ("sentence_embedding",), lane, arrived, (b"",), [(pending(deadline), 0)])


def put(target: BatchingQueue, *items: QueuedInput) -> list[QueuedInput]:
    for each in items:
        target.put(each)
    return list(items)


def lengths(batch: Sequence[QueuedInput]) -> list[int]:
    return [len(each.ids) for each in batch]


def test_inputs_of_two_graphs_never_share_a_batch() -> None:
    for arrivals, batches in (((10, 11, 9, 12), [[10, 9], [11, 12]]), ((11, 10, 12, 9), [[11, 12], [10, 9]])):
        waiting = queue(short_tokens=10)
        put(waiting, *map(item, arrivals))
        assert [lengths(waiting.take(0.0)[0]) for _ in batches] == batches
        assert not len(waiting)


def test_the_nearest_length_joins_first_from_either_side() -> None:
    waiting = queue(max_batch_tokens=3 * 12)
    put(waiting, item(10), item(4), item(12), item(9), item(16))
    assert lengths(waiting.take(0.0)[0]) == [10, 9, 12], "9 costs 1 of padding; 12 then costs 2 for each of two"
    assert lengths(waiting.take(0.0)[0]) == [4, 16], "16 costs 12, less than a run of its own"


def test_an_input_joins_while_its_padding_costs_no_more_than_a_run_of_its_own() -> None:
    for shorter, joins in ((84, True), (83, False)):
        waiting = queue(run_cost_tokens=16)
        put(waiting, item(100), item(shorter))
        assert lengths(waiting.take(0.0)[0]) == ([100, shorter] if joins else [100])


def test_a_longer_input_pays_for_padding_everyone_who_is_there() -> None:
    waiting = queue(run_cost_tokens=16)
    put(waiting, *(item(10) for _ in range(4)), item(14))
    assert lengths(waiting.take(0.0)[0]) == [10, 10, 10, 10, 14], "4 tokens for each of 4 are 16"
    put(waiting, *(item(10) for _ in range(5)), item(14))
    assert lengths(waiting.take(0.0)[0]) == [10] * 5
    assert lengths(waiting.take(0.0)[0]) == [14]


def test_a_free_run_means_no_padding_at_all() -> None:
    waiting = queue(run_cost_tokens=0)
    put(waiting, item(10), item(9), item(10))
    assert lengths(waiting.take(0.0)[0]) == [10, 10]


def test_interactive_work_passes_bulk_work_that_came_before_it() -> None:
    waiting = queue()
    put(waiting, item(8, arrived=0.0, lane=Lane.BULK), item(8, arrived=1.0))
    assert waiting.take(1.0)[0][0].lane == Lane.INTERACTIVE
    assert waiting.take(1.0)[0][0].lane == Lane.BULK


def test_bulk_work_is_passed_only_by_what_came_within_its_delay() -> None:
    waiting = queue()
    put(waiting, item(8, arrived=0.0, lane=Lane.BULK), item(8, arrived=BULK_DELAY_S + 0.1))
    assert waiting.take(3.0)[0][0].lane == Lane.BULK


def test_a_long_bulk_request_has_one_batch_in_four() -> None:
    """An hour of bulk work came an hour ago: still, interactive work waits for one batch of it, not for all."""
    waiting = queue(run_cost_tokens=0, max_batch_tokens=8)
    put(waiting, *(item(8, arrived=0.0, lane=Lane.BULK) for _ in range(20)))
    now, drawn = 100.0, []
    for _ in range(40):  # an interactive input every 0.1 s, a free worker every 0.1 s
        now += 0.1
        put(waiting, item(8, arrived=now))
        drawn.append(waiting.take(now)[0][0].lane)
    assert drawn.count(Lane.BULK) == 10
    assert drawn[0] == Lane.BULK


def test_an_input_is_kept_while_one_of_its_waiters_is_there() -> None:
    waiting = queue()
    (shared,) = put(waiting, item(8))
    shared.waiters[0][0].cancelled = True
    shared.waiters.append((pending(math.inf), 0))
    assert waiting.take(0.0) == ([shared], [])


class QueueMachine(RuleBasedStateMachine):
    """Whatever is put, cancelled and taken in whatever order: nothing is lost, nothing comes twice, and every batch is within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue(max_batch_tokens=64, run_cost_tokens=12)
        self.now = 0.0
        self.waiting: list[QueuedInput] = []

    @rule(length=st.integers(1, 80), lane=st.sampled_from(Lane), patience=st.sampled_from([0.5, 3.0, math.inf]))
    def come(self, length: int, lane: Lane, patience: float) -> None:
        self.waiting += put(self.queue, item(length, self.now, lane, self.now + patience))

    @rule(seconds=st.floats(0.01, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(at=st.integers(0, 1000))
    def leave(self, at: int) -> None:
        if self.waiting:
            self.waiting[at % len(self.waiting)].waiters[0][0].cancelled = True

    @rule()
    def take(self) -> None:
        batch, dropped = self.queue.take(self.now)
        for each in [*batch, *dropped]:
            self.waiting.remove(each)  # fails on what was never put, or was taken before
        assert all(each.taken for each in [*batch, *dropped])
        assert all(each.needed(self.now) for each in batch)
        assert not any(each.needed(self.now) for each in dropped)
        if not batch:
            assert not self.waiting
            return
        head, longest = batch[0], max(lengths(batch))
        assert len(batch) == 1 or longest * len(batch) <= 64
        assert len({each.lane for each in batch}) == 1
        before = [each for each in self.waiting if each.lane == head.lane and each.needed(self.now) and each.arrived < head.arrived]
        assert not before, "a batch is opened by the oldest of its lane"

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.queue.tokens == sum(len(each.ids) for each in self.waiting)

    def teardown(self) -> None:
        while self.waiting:
            self.take()
        assert self.queue.take(self.now) == ([], [])


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
