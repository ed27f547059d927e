"""Overload played through on a clock of the test's own: the real queue before a runtime of which it is known how long a run takes."""

import heapq
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest

from service.encoding.batching import QueuedInput
from service.encoding.pending import PendingRequest
from service.encoding.queue import Draw, EncoderLimits, EncoderQueue
from service.encoding.request import EncodeTask
from service.errors import DeadlineExceeded, NeverFits, Overloaded, QueueTooLong
from service.runtime.lanes import Lane
from service.tokenization.texts import Encoded

RUN_S, TOKEN_S, RUNS, LENGTH = 0.002, 0.00015, 2, 12  # a run, a token of it, runs side by side, tokens of an input
RETRY_S = 1.0  # what `Retry-After` says at least
# Requests of one input that a busy runtime answers in a second, in batches of 512 tokens.
CAPACITY = RUNS * (512 // LENGTH) / (RUN_S + 512 // LENGTH * LENGTH * TOKEN_S)
LIMITS = EncoderLimits(tokens_per_s=RUNS / TOKEN_S, run_cost_tokens=math.inf, concurrent_runs=RUNS, cores=RUNS)


def items(count: int, lane: Lane = Lane.INTERACTIVE, now: float = 0.0, length: int = LENGTH) -> list[QueuedInput]:
    work = PendingRequest(EncodeTask(inputs=[Encoded([1] * length, None, length)] * count, outputs=("o",)), now)
    return [QueuedInput([1] * length, None, ("o",), lane, now, (b"",), [(work, index)]) for index in range(count)]


def test_a_run_beside_another_takes_its_share_of_all_work() -> None:
    """Of 32 clients, 28 wait for one run and 4 for the other. When the first run ends, its 28 clients send again."""
    queue = EncoderQueue(LIMITS)

    def drawn(arriving: int) -> Draw:
        queue.enter(items(arriving), Lane.INTERACTIVE, 0.0, math.inf)
        return queue.draw(0.0)

    first, second = drawn(28), drawn(4)
    assert (len(first.batch), len(second.batch)) == (28, 4)
    queue.ended(first, 1.0, answered=True)
    assert len(drawn(28).batch) == 16
    queue.ended(second, 1.0, answered=True)
    assert len((third := drawn(4)).batch) == 16
    assert third.leaves_some is False


def test_a_run_that_its_share_limits_does_not_lower_the_rate() -> None:
    """It was short, and left inputs for the others. A run of the largest size does lower it."""
    queue, rates = EncoderQueue(LIMITS), [LIMITS.tokens_per_s]
    for waiting in (28, 200):
        queue.enter(items(16), Lane.INTERACTIVE, 0.0, math.inf)
        beside = queue.draw(0.0)
        queue.enter(items(waiting), Lane.INTERACTIVE, 0.0, math.inf)
        slow = queue.draw(0.0)
        assert slow.leaves_some
        queue.ended(slow, 60.0, answered=True)
        rates.append(queue.tokens_per_s)
        queue.ended(beside, 60.0, answered=True)
        while len(queue):
            queue.ended(queue.draw(0.0), 60.0, answered=False)
    assert rates[0] == rates[1] > rates[2]


@dataclass
class Played:
    """When requests came, and of those that were answered how long it took."""

    latency_s: dict[float, float] = field(default_factory=dict)
    refused: list[float] = field(default_factory=list)

    def p99_s(self, begin_s: float, end_s: float) -> float:
        return float(np.percentile([each for at, each in self.latency_s.items() if begin_s <= at < end_s], 99))

    def answered_per_s(self, begin_s: float, end_s: float) -> float:
        return sum(begin_s <= at + each < end_s for at, each in self.latency_s.items()) / (end_s - begin_s)


def arrivals(draw: random.Random, *stages: tuple[float, float]) -> list[float]:
    """Poisson arrivals at so many a second for so many seconds, stage after stage."""
    made, now, end = [], 0.0, 0.0
    for rate, seconds in stages:
        end += seconds
        while (now := now + draw.expovariate(rate)) < end:
            made.append(now)
        now = end
    return made


def play(queue: EncoderQueue, moments: Sequence[float], inputs: int = 1, again_until: float = -math.inf) -> Played:
    """A request at each moment; the runtime works as soon as it can. Who was answered or refused comes again until then."""
    played, coming = Played(), sorted(moments)
    ends: list[tuple[float, int, float, Draw]] = []  # of runs: when, order, since when, what

    def again(now: float) -> None:
        if now < again_until:
            heapq.heappush(coming, now)

    def refused(moment: float, now: float) -> None:
        played.refused.append(moment)
        again(now + RETRY_S)

    def begin(now: float) -> None:
        while len(ends) < RUNS and len(queue):
            draw = queue.draw(now)
            for moment in {item.arrived for item in draw.dropped}:
                refused(moment, now)
            if draw.batch:
                heapq.heappush(ends, (now + RUN_S + draw.tokens * TOKEN_S, len(played.latency_s) + id(draw), now, draw))

    while ends or coming:
        if ends and (not coming or ends[0][0] <= coming[0]):
            now, _, since, draw = heapq.heappop(ends)
            queue.ended(draw, now - since, answered=True)
            for item in draw.batch:
                played.latency_s[item.arrived] = now - item.arrived
                again(now)
        else:
            now = heapq.heappop(coming)
            try:
                queue.enter(items(inputs, now=now), Lane.INTERACTIVE, now, math.inf)
            except Overloaded:
                refused(now, now)
        begin(now)
    return played


KNEE = 0.85 * CAPACITY
SECONDS = 8.0  # of a stage; its first one, in which it settles, is looked at by itself


def test_in_an_overload_what_is_accepted_is_as_fast_as_before_and_the_runtime_has_no_pause() -> None:
    """8 s at the knee, 8 s at three times the knee, 8 s at half of it."""
    moments = arrivals(random.Random(1), (KNEE, SECONDS), (3 * KNEE, SECONDS), (KNEE / 2, SECONDS))
    played = play(EncoderQueue(LIMITS), moments)
    at_knee_s = played.p99_s(1, SECONDS)
    assert SECONDS < min(played.refused) < max(played.refused) < 2 * SECONDS + 1
    assert played.p99_s(SECONDS + 1, 2 * SECONDS) < 2 * at_knee_s
    assert played.answered_per_s(SECONDS + 1, 2 * SECONDS) > 0.9 * CAPACITY, "short runs cost it something"
    assert played.p99_s(2 * SECONDS + 1, 3 * SECONDS) < at_knee_s


@pytest.mark.parametrize(("clients", "begin_s"), [(8, 0.5), (60, 0.5), (600, 2.0), (600, 0.01)])
def test_clients_who_wait_for_their_answers_are_no_overload(clients: int, begin_s: float) -> None:
    """600 of them have a queue of half a second."""
    assert not play(EncoderQueue(LIMITS), [begin_s * n / clients for n in range(clients)], again_until=3.0).refused


def test_bulk_work_may_come_far_faster_than_it_is_done() -> None:
    """Sixty requests of a third of a second's work each within half a second; nor is a single text refused for them."""
    queue = EncoderQueue(LIMITS)
    work = items(32, Lane.BULK, length=128)
    for number in range(60):
        queue.check(Lane.BULK, number / 120, "")
        queue.enter(work, Lane.BULK, number / 120, math.inf)
    queue.check(Lane.INTERACTIVE, 0.5, "")


# One request after the other ----------------------------------------------------------------------------------------------------------


def make(**limits: float) -> EncoderQueue:
    return EncoderQueue(EncoderLimits(**{"tokens_per_s": 1000.0, "max_batch_tokens": 100, **limits}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("lengths", "alone"), [([29], False), ([30], True), ([15, 15], True), ([100, 1], False)])
def test_only_a_long_run_is_spread_over_the_cores_and_only_if_nothing_waits(lengths: list[int], alone: bool) -> None:
    queue = make(spread_tokens=30)
    for length in lengths:
        queue.enter(items(1, length=length), Lane.INTERACTIVE, 0, math.inf)
    draw = queue.draw(0)
    assert (draw.alone, draw.leaves_some) == (alone, sum(lengths) > 100)
    queue.enter(items(1, length=50), Lane.INTERACTIVE, 0, math.inf)
    assert not queue.draw(0).alone, "the first run has not ended"


def test_the_wait_is_that_of_the_lane() -> None:
    queue = make()
    queue.enter(items(1, Lane.BULK, length=5000), Lane.BULK, 0, math.inf)
    queue.enter(items(1, length=1001), Lane.INTERACTIVE, 0, math.inf)
    with pytest.raises(QueueTooLong, match=r"needs about 1.00 s and may need 1.00 s"):
        queue.check(Lane.INTERACTIVE, 0, "")


def test_a_bulk_request_of_any_size_is_taken_into_an_empty_queue_and_waits_its_turn_in_another() -> None:
    queue = make(max_bulk_wait_s=5)
    for _ in range(2):
        queue.enter(items(2048, Lane.BULK, length=2), Lane.BULK, 0, math.inf)
    with pytest.raises(QueueTooLong, match=r"needs about 8.19 s and may need 5.00 s") as refused:
        queue.enter(items(1, Lane.BULK), Lane.BULK, 0, math.inf)
    assert 8.192 <= refused.value.retry_after_s <= 1.1 * 8.2


def test_bulk_work_waits_by_how_fast_bulk_work_was_drawn() -> None:
    """Interactive work leaves it a batch of 100 tokens every two seconds: 2,000 tokens are 40 s of that, though only 2 s of the runtime."""
    queue = make(max_bulk_wait_s=30, bulk_delay_s=2)
    queue.enter(items(140, Lane.BULK, length=50), Lane.BULK, 0, math.inf)
    for now in range(0, 100, 2):
        for _ in range(2):
            queue.enter(items(1, now=now, length=100), Lane.INTERACTIVE, now, math.inf)
            queue.ended(queue.draw(now), 0.1, answered=True)
        queue.ended(queue.draw(now), 0.1, answered=True)
    assert queue.lanes[Lane.BULK].tokens == 2000
    with pytest.raises(QueueTooLong, match=r"needs about 3\d.\d\d s and may need 30.00 s"):
        queue.check(Lane.BULK, 100, "")


def test_where_interactive_work_is_refused_bulk_work_has_its_share_all_the_same() -> None:
    """One token in four, and no more is accepted than can begin within `max_bulk_wait_s` at that."""
    queue = make(max_bulk_wait_s=30)
    queue.enter(items(100, Lane.BULK, length=50), Lane.BULK, 0, math.inf)
    drawn = {Lane.INTERACTIVE: 0, Lane.BULK: 0}
    refused = 0
    for tenth in range(200):
        now = tenth / 10
        for _ in range(4):  # twice what can be done
            try:
                queue.enter(items(1, now=now, length=50), Lane.INTERACTIVE, now, math.inf)
            except QueueTooLong:
                refused += 1
        draw = queue.draw(now)
        drawn[draw.batch[0].lane] += draw.tokens
        queue.ended(draw, 0.1, answered=True)
    assert refused > 100
    assert drawn[Lane.BULK] == pytest.approx(sum(drawn.values()) / 4, rel=0.1)


def test_bulk_work_that_comes_with_an_overload_is_taken_as_far_as_its_share_goes() -> None:
    """From the first request on, when nothing was measured yet: at 250 tokens a second, 30 s are 7,500."""
    queue = make(max_bulk_wait_s=30)
    for lane, count in ((Lane.INTERACTIVE, 1), (Lane.BULK, 20)):
        for _ in range(100):
            with suppress(QueueTooLong):
                queue.enter(items(count, lane, length=50), lane, 0, math.inf)
    assert queue.lanes[Lane.BULK].tokens == 8000


def test_of_equal_bulk_requests_the_first_is_finished_first() -> None:
    """Were they to share the runtime, all four would be finished at the end."""
    queue = make(max_bulk_wait_s=30)
    works = []
    for client in "abcd":
        made = items(40, Lane.BULK, length=20)
        for each in made:
            each.client = client
        works.append(made[0].waiters[0][0])
        queue.enter(made, Lane.BULK, 0, math.inf)
    ended = []
    while batch := queue.draw(0).batch:
        for item in batch:
            ((work, index),) = item.waiters
            work.set(index, None)
            if not work.remaining:
                ended.append((works.index(work), queue.tokens))
    assert ended == [(0, 2400), (1, 1600), (2, 800), (3, 0)]


# Clients -------------------------------------------------------------------------------------------------------------------------------


def sent(client: str, count: int, length: int = LENGTH, now: float = 0.0) -> list[QueuedInput]:
    made = items(count, now=now, length=length)
    for each in made:
        each.client = client
    return made


def test_a_client_that_fills_the_queue_neither_delays_others_nor_has_them_refused() -> None:
    queue = make()
    queue.enter(sent("greedy", 500), Lane.INTERACTIVE, 0, math.inf)  # of six seconds
    for n in range(24):
        queue.check(Lane.INTERACTIVE, 0, f"small-{n}")
        queue.enter(sent(f"small-{n}", 1), Lane.INTERACTIVE, 0, math.inf)
    with pytest.raises(QueueTooLong):
        queue.check(Lane.INTERACTIVE, 0, "greedy")
    with pytest.raises(QueueTooLong):
        queue.enter(sent("greedy too", 500), Lane.INTERACTIVE, 0, math.inf)
    queue.check(Lane.INTERACTIVE, 0, "one more")  # nor do refusals of the greedy count as an overload
    drawn: list[str] = []
    while len(set(drawn)) < 25:
        drawn += [item.client for item in queue.draw(0).batch]
    assert drawn.count("greedy") < 50, "some of it fills the others' batches"


def test_with_many_clients_an_overload_is_one() -> None:
    queue = make()
    refused = 0
    for n in range(200):  # two and a half seconds
        try:
            queue.enter(sent(f"client-{n}", 1), Lane.INTERACTIVE, 0, math.inf)
        except QueueTooLong:
            refused += 1
    assert refused > 100
    with pytest.raises(QueueTooLong, match=r"may need 0.03 s"):
        queue.check(Lane.INTERACTIVE, 0.1, "another")


def test_what_one_client_sent_is_drawn_in_its_order() -> None:
    queue = make(max_batch_tokens=LENGTH)
    made = sent("a", 5)
    queue.enter(made, Lane.INTERACTIVE, 0, math.inf)
    assert [queue.draw(0).batch[0] for _ in made] == made


def test_a_request_that_was_begun_is_not_dropped_for_its_wait() -> None:
    """Two inputs of one request wait as long as two of another; the run that takes the first of all makes the difference."""
    queue = make()
    one, other = items(2, length=60), items(2, length=60)
    for each in (one, other):
        queue.enter(each, Lane.INTERACTIVE, 0, math.inf)
    queue.enter(items(1, length=1000), Lane.INTERACTIVE, 0, math.inf)
    assert queue.draw(0).batch == one[:1]
    with pytest.raises(QueueTooLong):
        queue.check(Lane.INTERACTIVE, 2.0, "")
    draw = queue.draw(2.0)
    assert (draw.batch, draw.dropped) == (one[1:], [])
    draw = queue.draw(2.0)
    assert not draw.batch
    assert draw.dropped[:2] == other


def test_a_rate_that_was_measured_too_low_is_found_out_by_the_few_that_are_taken() -> None:
    queue = make(tokens_per_s=1.0)
    for now in range(60):
        queue.enter(items(1), Lane.INTERACTIVE, now, math.inf)
        queue.ended(queue.draw(now), 0.01, answered=True)
    assert queue.tokens_per_s == pytest.approx(LENGTH / 0.01, rel=0.01)


def test_a_run_that_took_all_there_was_does_not_lower_the_rate() -> None:
    queue = make()
    queue.enter(items(1, length=1), Lane.INTERACTIVE, 0, math.inf)
    queue.ended(queue.draw(0), 1.0, answered=True)
    assert queue.tokens_per_s == 1000
    queue.enter(items(3, length=90), Lane.INTERACTIVE, 0, math.inf)
    queue.ended(queue.draw(0), 1.0, answered=True)
    assert queue.tokens_per_s == pytest.approx(0.9 * 1000 + 0.1 * 90)


def test_nothing_is_queued_of_a_request_that_is_refused() -> None:
    queue = make(max_queue_tokens=100)
    with pytest.raises(NeverFits):
        queue.enter(items(101, length=1), Lane.INTERACTIVE, 0, math.inf)
    with pytest.raises(DeadlineExceeded):
        queue.enter(items(1), Lane.INTERACTIVE, 1, 1)
    queue.enter(items(1, length=60), Lane.INTERACTIVE, 0, math.inf)
    with pytest.raises(Overloaded, match="60 of 100 tokens"):
        queue.enter(items(1, length=60), Lane.INTERACTIVE, 0, math.inf)
    assert queue.tokens == 60
