"""How many replicas a pool needs: with the project's own admission, queues and policy, at the targets that ship, on a clock of the test."""

import heapq
import itertools
import math
import random
import warnings
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, of pydantic
    from ray.serve import autoscaling_policy
    from ray.serve._private import autoscaling_state
    from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
    from ray.serve._private.config import DeploymentConfig, ReplicaConfig
    from ray.serve._private.deployment_info import DeploymentInfo
    from ray.serve.config import AutoscalingConfig

from service.deployment.scaling import ENCODER_TARGET, LOAD, ByLoad, autoscaling
from service.encoding.batching import QueuedInput
from service.encoding.pending import PendingRequest
from service.encoding.queue import EncoderLimits, EncoderQueue
from service.encoding.request import EncodeTask
from service.errors import Overloaded
from service.runtime.lanes import Lane
from service.runtime.offered import Offered, OfferedSlots
from service.tokenization.texts import Encoded


def context(loads: dict[str, list[tuple[float, float]]], there: int, now: float = 100.0, state: dict[str, Any] | None = None) -> Any:
    """What Serve gives the policy: samples of (time, load) by replica."""
    samples = {name: [TimeStampedValue(at, value) for at, value in of] for name, of in loads.items()}
    return SimpleNamespace(raw_metrics={LOAD: samples}, target_num_replicas=there, current_time=now, policy_state=state or {})


def decided(target: float, loads: list[float], there: int) -> int:
    """The number for replicas with constant loads, without a delay."""
    steady = {f"replica {n}": [(float(at), load) for at in range(80, 101, 2)] for n, load in enumerate(loads)}
    return ByLoad(target, keep_s=0)(context(steady, there))[0]


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


@pytest.mark.parametrize("metrics", [None, {}, {"load": {}}, {"load": {"replica": []}}])
def test_while_no_replica_has_reported_the_number_stays(metrics: object) -> None:
    assert ByLoad(0.5)(SimpleNamespace(raw_metrics=metrics, target_num_replicas=7, current_time=0.0)) == (7, {})


def test_work_that_new_replicas_have_taken_over_is_counted_once() -> None:
    """One replica had a load of 4 until three others took three quarters of it."""
    loads = {"first": [(float(at), 4.0 if at <= 94 else 1.0) for at in range(80, 101, 2)]}
    loads |= {f"new {n}": [(94.0, 0.0), (96.0, 1.0), (98.0, 1.0), (100.0, 1.0)] for n in range(3)}
    assert ByLoad(0.8)(context(loads, 5))[0] == 5


def test_a_replica_that_is_silent_does_not_stop_decisions() -> None:
    loads = {"silent": [(10.0, 1.0), (12.0, 1.0)], "alive": [(float(at), 3.2) for at in range(80, 101, 2)]}
    assert ByLoad(0.8)(context(loads, 2))[0] == 4


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
        work = PendingRequest(EncodeTask(inputs=[Encoded([0] * tokens, None, tokens)], outputs=("embedding",)), now)
        item = QueuedInput([0] * tokens, None, ("embedding",), Lane.INTERACTIVE, now, (b"",), [(work, 0)], client)
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


def test_the_load_of_slots_is_what_runs_hold_and_what_refused_runs_would_hold() -> None:
    offered = OfferedSlots(4)
    offered.load(0.0)
    offered.hold(0.0, 2)
    offered.begin(2)
    assert offered.load(10.0) == 0.5
    for counted, load in ((True, 0.75), (False, 0.5)):  # recent runs held a slot for 10 s; a gateway may count refusals instead
        offered.counts_refusals = counted
        with pytest.raises(Overloaded), offered.refusing(1):
            raise Overloaded("full", retry_after_s=1)
        now = 20.0 if counted else 30.0
        assert offered.load(now) == pytest.approx(load, abs=0.02)


START_S = 12.0  # from a decision until a new replica has loaded its bundles, where a node has room


class Fleet:
    """Replicas that report as Serve's do, clients that ask the next one in turn, and Serve's own autoscaling state with the configuration
    that ships."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, make: Callable[[Clock], Encoder], replicas: int) -> None:
        self.clock = Clock()
        self.refused = self.asked = 0
        self.numbers: list[tuple[float, int]] = []
        self._make, self._random, self._names = make, random.Random(7), itertools.count()
        for module in (autoscaling_state, autoscaling_policy):
            monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 1e9 + self.clock.now))
        self._id = DeploymentID("pool", "app")
        self._serve = autoscaling_state.DeploymentAutoscalingState(self._id)
        with pytest.warns(DeprecationWarning, match="metrics_interval_s"):
            config = AutoscalingConfig(**autoscaling(1, 100, make(self.clock).TARGET))
        self._every_s, self._keeps_s = config.metrics_interval_s, config.look_back_period_s
        info = DeploymentInfo(
            deployment_config=DeploymentConfig(autoscaling_config=config, num_replicas=None),
            replica_config=ReplicaConfig.create(lambda: None),
            start_time_ms=0,
            deployer_job_id="",
            version="1",
        )
        self._serve.register(info, replicas)
        self._there: dict[ReplicaID, Encoder] = {}
        self._samples: dict[ReplicaID, deque[TimeStampedValue]] = {}
        self._target = replicas
        for _ in range(replicas):
            self._start()
        self._decide()

    def _start(self) -> None:
        name = ReplicaID(f"{next(self._names):08}", self._id)
        self._there[name], self._samples[name] = self._make(self.clock), deque()
        self._there[name].offered.counts_refusals = True
        self._serve.update_running_replica_ids(list(self._there))
        self.clock.at(self.clock.now + self._random.uniform(0, self._every_s), lambda: self._report(name))

    def _report(self, name: ReplicaID) -> None:
        if name in self._there:
            now, samples = 1e9 + self.clock.now, self._samples[name]
            samples.append(TimeStampedValue(now, self._there[name].offered.load(self.clock.now)))
            while samples[0].timestamp < now - self._keeps_s:
                samples.popleft()
            self._serve.record_request_metrics_for_replica(ReplicaMetricReport(name, {LOAD: list(samples)}, now))
            self.clock.at(self.clock.now + self._every_s, lambda: self._report(name))

    def _decide(self) -> None:
        number = self._serve.get_decision_num_replicas(self._target)
        for _ in range(number - self._target):
            self.clock.at(self.clock.now + START_S, lambda: len(self._there) < self._target and self._start())
        for name in list(self._there)[number:]:
            del self._there[name]
            self._serve.on_replica_stopped(name)
        self._serve.update_running_replica_ids(list(self._there))
        self._target = number
        self.numbers.append((self.clock.now, number))
        self.clock.at(self.clock.now + 1.0, self._decide)

    def play(self, requests_per_s: float, tokens: int, seconds: float) -> list[int]:
        """Return how many replicas there should be after each decision."""
        begin, until = self.clock.now, self.clock.now + seconds
        if requests_per_s:
            self._arrive(requests_per_s, tokens, until)
        self.clock.run(until)
        return [number for at, number in self.numbers if at > begin]

    def _arrive(self, requests_per_s: float, tokens: int, until: float) -> None:
        moment = self.clock.now + self._random.expovariate(requests_per_s)
        if moment < until:
            client = f"client {self._random.randrange(400)}"
            self.clock.at(moment, lambda: self._ask(client, self._random.randint(1, 2 * tokens - 1)))
            self.clock.at(moment, lambda: self._arrive(requests_per_s, tokens, until))

    def _ask(self, client: str, tokens: int) -> None:
        self.asked += 1
        try:
            list(self._there.values())[self.asked % len(self._there)].ask(client, tokens)
        except Overloaded:
            self.refused += 1


def settles(numbers: list[int], right: float) -> bool:
    """The last numbers are within a tenth of the right one, and none is above that; where that is less than a replica, within one."""
    least, most = min(0.9 * right, right - 1), max(1.1 * right, math.ceil(right) + 1)
    return all(least <= number <= most for number in numbers[-20:]) and max(numbers) <= most


REPLICAS = 4


@pytest.mark.parametrize(("tokens_per_s", "factor"), [(5_000.0, 0.95), (5_000.0, 1.5), (5_000.0, 5.0), (1_000_000.0, 1.5)])
def test_encoders_settle_at_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, tokens_per_s: float, factor: float) -> None:
    """The number depends on the load alone, whatever share of it is refused meanwhile, and does not overshoot."""
    fleet = Fleet(monkeypatch, lambda clock: Encoder(clock, tokens_per_s), REPLICAS)
    numbers = fleet.play(factor * REPLICAS * 10, int(tokens_per_s / 10), 80)
    assert settles(numbers, factor * REPLICAS / ENCODER_TARGET), numbers
    assert factor < 1 or fleet.refused > 0


def test_a_burst_has_its_replicas_decided_within_20_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what three can do at their target to 4.3 times as much: deploy/faults.md has these times."""
    fleet = Fleet(monkeypatch, lambda clock: Encoder(clock, 5_000.0), 3)
    fleet.play(0.9 * 3 * ENCODER_TARGET * 10, 500, 60)
    numbers = fleet.play(4.3 * 3 * ENCODER_TARGET * 10, 500, 60)
    assert next(second for second, number in enumerate(numbers, 1) if number > numbers[0]) <= 10
    assert next(second for second, number in enumerate(numbers, 1) if number >= 0.9 * 12.9) <= 20
    assert settles(numbers, 12.9), numbers


def test_a_pause_removes_no_replica_that_is_needed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of 25 s after five minutes in which one replica too many was there."""
    fleet = Fleet(monkeypatch, lambda clock: Encoder(clock, 5_000.0), 8)
    load = 6.5 * ENCODER_TARGET * 10
    fleet.play(load, 500, 295)
    assert min(fleet.play(0, 500, 25)) >= 7
    refused, asked = fleet.refused, fleet.asked
    fleet.play(load, 500, 60)
    assert fleet.refused - refused < 0.01 * (fleet.asked - asked)


def test_a_controller_that_has_just_started_removes_no_replica() -> None:
    state: dict[str, Any] = {}
    for now in (100.0, 399.0):
        number, state = ByLoad(0.8)(context({"replica": [(float(at), 0.1) for at in range(80, 101, 2)]}, 5, now, state))
        assert number == 5
