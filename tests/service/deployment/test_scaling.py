"""How many replicas a pool needs: with the project's own admission, queues and policy, at the targets that ship, on a clock of the test."""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from service.deployment.scaling import ENCODER_TARGET, GATEWAY_TARGET, GENERATOR_TARGET, LOAD, ByLoad
from service.encoding.batching import QueuedInput
from service.encoding.pending import PendingRequest
from service.encoding.queue import EncoderLimits, EncoderQueue
from service.encoding.request import EncodeTask
from service.errors import Overloaded
from service.generation.admission import Admission as SlotAdmission
from service.generation.admission import Holding, QueueLimits, Turn
from service.generation.request import GenerationRequest, Sampling
from service.generation.run import Run
from service.generation.sequence import Sequence
from service.generation.submission import Submission
from service.runtime.lanes import Lane
from service.runtime.offered import Offered, OfferedSlots
from service.telemetry.usage import Usage
from service.tokenization.texts import Encoded

EVERY_S = 2.0  # replicas are asked so often, and the policy has the mean of the last ten: `autoscaling` in scaling.py
LOOKS = 10


def decided(target: float, loads: list[float], there: int) -> int:
    context = SimpleNamespace(aggregated_metrics={LOAD: dict(enumerate(loads))}, target_num_replicas=there)
    wanted, state = ByLoad(target)(context)
    assert state == {}
    return wanted


@pytest.mark.parametrize(
    ("loads", "there", "wanted"),
    [
        ([0.0, 0.0], 2, 0),
        ([0.8, 0.8], 2, 2),
        ([0.83, 0.83], 2, 2),  # hardly more than two should have
        ([0.9, 0.9], 2, 3),
        ([0.41, 0.41], 2, 2),
        ([0.3, 0.3], 2, 1),
        ([5.0], 1, 7),
    ],
)
def test_as_many_as_share_the_load_at_the_target(loads: list[float], there: int, wanted: int) -> None:
    assert decided(0.8, loads, there) == wanted


@pytest.mark.parametrize("metrics", [None, {}, {"load": {}}])
def test_while_no_replica_has_said_anything_the_number_stays(metrics: object) -> None:
    assert ByLoad(0.5)(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=7)) == (7, {})


# A pool on a clock of its own ------------------------------------------------------------------------------------------------------------


class Clock:
    """Events in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, moment: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), event))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until


class Encoder:
    """One runtime thread behind the project's admission: a run costs its tokens and a price of its own."""

    TARGET = ENCODER_TARGET

    def __init__(self, clock: Clock, tokens_per_s: float) -> None:
        batch = int(max(512, tokens_per_s / 50))
        # As measured at start: full batches. A run of few tokens is slower, as it is in the runtime.
        self.offered = Offered()
        self._clock, self._tokens_per_s, self._busy = clock, tokens_per_s, False
        self._queue = EncoderQueue(EncoderLimits(tokens_per_s=tokens_per_s, max_batch_tokens=batch), self.offered)

    def ask(self, client: str, tokens: int) -> None:
        """Raises Overloaded."""
        now = self._clock.now
        self._queue.check(Lane.INTERACTIVE, now, client)
        work = PendingRequest(EncodeTask(inputs=[Encoded([0] * tokens, None, tokens)], output="embedding"), now)
        item = QueuedInput([0] * tokens, None, "embedding", Lane.INTERACTIVE, now, b"", [(work, 0)], client)
        self._queue.enter([item], Lane.INTERACTIVE, now, math.inf)
        if not self._busy:
            self._draw()

    def _draw(self) -> None:
        draw = self._queue.draw(self._clock.now)
        self._busy = bool(draw.batch)
        if draw.batch:
            seconds = draw.tokens / self._tokens_per_s

            def ended() -> None:
                self._queue.ended(draw, seconds, answered=True)
                self._draw()

            self._clock.at(self._clock.now + seconds, ended)


class Generator:
    """Slots behind the project's admission, and what the engine does with them: several steps are one event here."""

    TARGET = GENERATOR_TARGET
    SLOTS = 16
    ASIDE = 32  # as many runs as may have given their slots back

    def __init__(self, clock: Clock, step_s: float, steps: int) -> None:
        self.offered = OfferedSlots(self.SLOTS)
        self.waited: list[float] = []
        self._clock, self._step_s, self._steps = clock, step_s, steps
        self._quantum = max(4, min(128, int(0.25 / step_s)))
        self._holders: list[Sequence] = []
        self._left: dict[Sequence, int] = {}
        self._stepping = False
        self._admission = SlotAdmission[Sequence](QueueLimits(max_waiting_tokens=10**6))
        self._run_s = 0.0

    @property
    def pending(self) -> int:
        return len(self._holders) + len(self._admission)

    def ask(self, client: str, tokens: int) -> None:
        now = self._clock.now
        by_client: dict[str, int] = {}
        for holder in self._holders:
            by_client[holder.request.client] = by_client.get(holder.request.client, 0) + 1
        submission = Submission[Sequence](client, Lane.INTERACTIVE, submitted=now, since=now)
        with self.offered.refusing(1):
            self._admission.check(client, Lane.INTERACTIVE, now, Holding(self.SLOTS, by_client, self._turn_s()))
            request = GenerationRequest(prompt=(1,), sampling=Sampling(seed=0), max_tokens=tokens, client=client)
            run = Run(request, Usage(1, submitted=now), self._admission.cancel)
            sequence = Sequence(run=run, stops=None, matcher=None, ends=frozenset(), order=0, submission=submission)
            submission.fresh.append(sequence)
            for gone in self._admission.queue(submission, retry_after_s=1.0):
                self.offered.refuse(len(gone.fresh))
        self._left[sequence] = tokens
        if not self._stepping:
            self._step()

    def _turn_s(self) -> float:
        if self._admission.aside < self.ASIDE:
            return min(self._run_s, self._quantum * self._step_s)
        ages = [self._clock.now - (holder.run.usage.started or 0) for holder in self._holders]
        return max(self._run_s, sum(ages) / len(ages))

    def _turn(self, now: float) -> Turn[Sequence] | None:
        free, room = self.SLOTS - len(self._holders), self._admission.aside < self.ASIDE
        return self._admission.turn(now, self._holders, free=free, quantum=self._quantum, room=room)

    def _admit(self) -> None:
        now = self._clock.now
        while len(self._admission) and (turn := self._turn(now)) is not None:
            if turn.instead_of is not None:
                self._admission.set_aside(turn.instead_of, now)
                self._holders.remove(turn.instead_of)
            self._holders.append(turn.job)
            turn.job.placed_at = turn.job.position
            if turn.job.run.usage.started is None:
                turn.job.run.usage.started = now
                self.offered.begin()
                self.waited.append(now - turn.job.run.usage.submitted)
        for submission, _ in self._admission.overdue(now):
            self.offered.refuse(len(submission.fresh))

    def _step(self) -> None:
        self._admit()
        self.offered.hold(self._clock.now, len(self._holders))
        self._stepping = bool(self._holders)
        if self._stepping:
            self._clock.at(self._clock.now + self._step_s * self._steps, self._stepped)

    def _stepped(self) -> None:
        for sequence in list(self._holders):
            self._left[sequence] -= self._steps
            sequence.position += self._steps
            if self._left[sequence] <= 0:
                self._holders.remove(sequence)
                del self._left[sequence]
                self._run_s = 0.9 * self._run_s + 0.1 * (self._clock.now - (sequence.run.usage.started or 0))
        self._step()


def test_a_gateway_that_is_busy_all_the_time_gets_another_beside_it() -> None:
    """It cannot say how much more there is: the number grows by a share of itself until they are not."""
    number = 1
    for _ in range(6):
        number = decided(GATEWAY_TARGET, [min(4.5 / number, 1.0)] * number, number)
    assert 4.5 / number <= GATEWAY_TARGET * 1.06
    assert number <= math.ceil(4.5 / GATEWAY_TARGET)


@dataclass
class Fleet:
    """Replicas, clients that ask the next one in turn, and the policy every twenty seconds."""

    make: Callable[[Clock], Encoder | Generator]
    replicas: int
    clients: int = 400
    clock: Clock = field(default_factory=Clock)
    refused: int = 0
    asked: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(7)
        self._there = [self.make(self.clock) for _ in range(self.replicas)]
        self._said = [deque[float](maxlen=LOOKS) for _ in self._there]

    def play(self, requests_per_s: float, tokens: int, decisions: int) -> list[int]:
        """How many there are after each decision."""
        numbers = []
        for _ in range(decisions):
            until = self.clock.now + LOOKS * EVERY_S
            self._arrive(requests_per_s, tokens, until)
            for _ in range(LOOKS):
                self.clock.run(self.clock.now + EVERY_S)
                for replica, said in zip(self._there, self._said, strict=True):
                    said.append(replica.offered.load(self.clock.now))
            means = [sum(said) / len(said) for said in self._said]
            self._scale(max(decided(self._there[0].TARGET, means, len(self._there)), 1))
            numbers.append(len(self._there))
        return numbers

    def _scale(self, number: int) -> None:
        for _ in range(number - len(self._there)):
            self._there.append(self.make(self.clock))
            self._said.append(deque(maxlen=LOOKS))
        del self._there[number:], self._said[number:]

    def _arrive(self, requests_per_s: float, tokens: int, until: float) -> None:
        moment = self.clock.now + self._random.expovariate(requests_per_s)
        if moment < until:
            self.clock.at(moment, lambda: self._ask(requests_per_s, tokens, until))

    def _ask(self, requests_per_s: float, tokens: int, until: float) -> None:
        self.asked += 1
        replica = self._there[self.asked % len(self._there)]
        try:
            replica.ask(f"client {self._random.randrange(self.clients)}", self._random.randint(1, 2 * tokens - 1))
        except Overloaded:
            self.refused += 1
        self._arrive(requests_per_s, tokens, until)


def settles(numbers: list[int], right: float) -> bool:
    """Within a tenth of the right number, or, where that is small, within a replica."""
    return all(abs(number - right) <= max(0.1 * right, 1) for number in numbers[-2:])


REPLICAS = 4
LOADS = (0.2, 0.95, 1.5, 5.0)  # of what these can do


@pytest.mark.parametrize("factor", LOADS)
@pytest.mark.parametrize("tokens_per_s", [5_000.0, 1_000_000.0], ids=["cpu", "gpu"])
def test_encoders_settle_at_what_is_asked_for(tokens_per_s: float, factor: float) -> None:
    """Replicas at a fifth of what they can do, and at five times as much. The number depends on the load alone, whatever share of it
    is refused meanwhile; and so it does when the load changes back."""
    tokens = int(tokens_per_s / 10)
    fleet = Fleet(lambda clock: Encoder(clock, tokens_per_s), REPLICAS)
    numbers = fleet.play(factor * REPLICAS * 10, tokens, 3)
    assert settles(numbers, factor * REPLICAS / ENCODER_TARGET), numbers
    assert factor < 1 or fleet.refused > 0
    back = fleet.play(REPLICAS * 10, tokens, 3)
    assert settles(back, REPLICAS / ENCODER_TARGET), back


@pytest.mark.parametrize("factor", [0.2, 1.5, 5.0])
@pytest.mark.parametrize(("step_s", "steps", "tokens"), [(0.033, 5, 60), (16e-6, 12_500, 150_000)], ids=["cpu", "gpu"])
def test_generators_settle_at_what_is_asked_for(step_s: float, steps: int, tokens: int, factor: float) -> None:
    """The same for slots: sixteen that each draw 30 tokens a second and go round, and sixteen that together draw a million."""
    run_s = tokens * step_s
    fleet = Fleet(lambda clock: Generator(clock, step_s, steps), REPLICAS)
    capacity = REPLICAS * Generator.SLOTS / run_s
    numbers = fleet.play(factor * capacity, tokens, 5)
    assert settles(numbers, factor * REPLICAS / GENERATOR_TARGET), numbers
    back = fleet.play(capacity, tokens, 3)
    assert settles(back, REPLICAS / GENERATOR_TARGET), back
