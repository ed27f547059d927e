"""Clients that wait as long as they are told, before the real queues and on a clock of the test's own."""

import heapq
import math
from dataclasses import dataclass
from typing import Any

import pytest

from service.encoding.batching import QueuedInput
from service.encoding.pending import PendingRequest
from service.encoding.queue import Draw, EncoderLimits, EncoderQueue
from service.encoding.request import EncodeTask
from service.errors import Overloaded
from service.generation.admission import Admission, Holding, QueueLimits
from service.generation.request import GenerationRequest, Sampling
from service.generation.submission import Submission
from service.overload.promises import Promises
from service.runtime.lanes import Lane
from service.tokenization.texts import Encoded


@dataclass
class Client:
    """A client that comes back when it is told to, rounded up to seconds if `seconds`."""

    name: str
    arrived: float
    seconds: bool = False
    tries: int = 0
    told_s: float = 0.0
    answered: float = math.inf


class Texts:
    """A decoder with slots, each of which a run keeps for `turn_s`."""

    def __init__(self, slots: int, turn_s: float) -> None:
        self._holding = lambda held: Holding(slots, held, turn_s)
        self._turn_s, self.slots = turn_s, slots
        self._admission = Admission[Any](QueueLimits(slots=slots))
        self._running: list[tuple[float, int, Client]] = []
        self._clients: dict[str, Client] = {}
        self._begun = 0

    def ask(self, client: Client, now: float) -> None:
        held: dict[str, int] = {}
        for _, _, each in self._running:
            held[each.name] = held.get(each.name, 0) + 1
        submission = Submission[Any](client.name, Lane.INTERACTIVE, now, now)
        submission.most_wait_s = self._admission.check(client.name, Lane.INTERACTIVE, now, self._holding(held))
        submission.fresh.append(Job(submission))
        self._admission.queue(submission, retry_after_s=1.0)
        self._clients[client.name] = client

    @property
    def pending(self) -> int:
        return len(self._running) + len(self._admission)

    def keeps_places(self, now: float) -> bool:
        return self._admission.keeps_places(Lane.INTERACTIVE, now)

    def withdraw(self, client: str, told_s: float) -> None:
        self._admission.withdraw(Lane.INTERACTIVE, client, told_s)

    def go_on(self, now: float) -> tuple[float, list[tuple[Client, Overloaded]]]:
        """Play up to this time. Returns when something happens next, and the clients that have waited too long."""
        while self._running and self._running[0][0] <= now:
            _, _, done = heapq.heappop(self._running)
            done.answered = now
        while (turn := self._admission.turn(now, (), free=self.slots - len(self._running))) is not None:
            self._begun += 1
            heapq.heappush(self._running, (now + self._turn_s, self._begun, self._clients[turn.job.submission.client]))
        late = [(self._clients[submission.client], error) for submission, error in self._admission.overdue(now)]
        waits = [job.submission.submitted + max(job.submission.most_wait_s, 1.0) + 1e-6 for job in self._admission.waiting()]
        return min([each for each, _, _ in self._running] + waits, default=math.inf), late


class Job:
    """As much of a sequence as the queue looks at."""

    left_of_prompt, aside, slots = 1, False, 1

    def __init__(self, submission: Submission[Any]) -> None:
        self.submission = submission
        self.request = GenerationRequest(prompt=(1,), sampling=Sampling(seed=0), max_tokens=1, client=submission.client)


class Vectors:
    """An encoder that computes a run of at most 512 tokens at a time, `per_s` requests in a second, with room for `room` requests."""

    def __init__(self, per_s: float, tokens: int = 32, room: int = 10_000) -> None:
        self._token_s, self._tokens = 1 / (per_s * tokens), tokens
        self._queue = EncoderQueue(EncoderLimits(tokens_per_s=per_s * tokens, run_cost_tokens=math.inf, max_queue_tokens=room * tokens))
        self._run: tuple[float, Draw] | None = None
        self._clients: dict[int, Client] = {}

    def ask(self, client: Client, now: float) -> None:
        self._queue.check(Lane.INTERACTIVE, now, client.name)
        encoded = Encoded([1] * self._tokens, None, self._tokens)
        work = PendingRequest(EncodeTask(inputs=[encoded], outputs=("o",), client=client.name), now)
        item = QueuedInput(encoded.ids, None, ("o",), Lane.INTERACTIVE, now, (b"",), [(work, 0)], client.name)
        self._queue.enter([item], Lane.INTERACTIVE, now, math.inf)
        self._clients[id(item)] = client

    @property
    def pending(self) -> int:
        return len(self._queue)

    def keeps_places(self, now: float) -> bool:
        return self._queue.keeps_places(Lane.INTERACTIVE, now)

    def withdraw(self, client: str, told_s: float) -> None:
        self._queue.withdraw(Lane.INTERACTIVE, client, told_s)

    def go_on(self, now: float) -> tuple[float, list[tuple[Client, Overloaded]]]:
        late: list[tuple[Client, Overloaded]] = []
        if self._run is not None and self._run[0] <= now:
            ended, draw = self._run
            self._queue.ended(draw, draw.tokens * self._token_s, answered=True)
            for item in draw.batch:
                self._clients[id(item)].answered = ended
            self._run = None
        if self._run is None and len(self._queue):
            draw = self._queue.draw(now)
            late = [(self._clients[id(item)], self._queue.too_late(item, now)) for item in draw.dropped]
            self._run = (now + draw.tokens * self._token_s, draw) if draw.batch else None
        return math.inf if self._run is None else self._run[0], late


def play(service: Any, clients: list[Client]) -> None:
    """Until all are answered."""
    events = [(client.arrived, number, client) for number, client in enumerate(clients)]
    heapq.heapify(events)
    wakes = math.inf
    while events or wakes < math.inf:
        now = min(wakes, events[0][0] if events else math.inf)
        refused: list[tuple[Client, Overloaded]] = []
        if events and events[0][0] == now:
            _, _, client = heapq.heappop(events)
            client.tries += 1
            try:
                service.ask(client, now)
            except Overloaded as error:
                refused.append((client, error))
        wakes, late = service.go_on(now)
        for client, error in refused + late:
            client.told_s = math.ceil(error.retry_after_s) if client.seconds else error.retry_after_s
            heapq.heappush(events, (now + client.told_s, clients.index(client), client))


@pytest.mark.parametrize("seconds", [False, True], ids=["exact", "whole seconds"])
@pytest.mark.parametrize(
    ("make", "count", "per_s"),
    [
        (lambda: Texts(slots=1, turn_s=4.0), 13, 1 / 4),
        (lambda: Texts(slots=8, turn_s=10.0), 60, 8 / 10),
        (lambda: Vectors(per_s=100), 400, 100),
        (lambda: Vectors(per_s=10), 100, 10),
    ],
    ids=["texts", "slots", "vectors", "slow vectors"],
)
@pytest.mark.parametrize("newcomers", [0, 1], ids=["a burst", "others all the time"])
def test_clients_that_wait_as_told_are_answered_at_the_second_try(
    make: Any, count: int, per_s: float, seconds: bool, newcomers: int
) -> None:
    """And none is told over twice the time that the work of all before it needs. Others who come meanwhile do not take their places."""
    burst = [Client(f"10.0.{at // 250}.{at % 250}:1", at * 0.001, seconds) for at in range(count)]
    others = [Client(f"10.1.{at // 250}.{at % 250}:1", (at + 0.5) / per_s * 2, seconds) for at in range(newcomers * count)]
    service = make()
    play(service, burst + others)
    refused = [each for each in burst if each.tries > 1]
    assert len(refused) > count / 4
    assert sum(each.tries == 2 for each in refused) >= 0.95 * len(refused)
    needed_s = count / per_s
    assert max(each.told_s for each in refused) <= 1.25 * needed_s + 2
    assert max(each.answered for each in burst) <= 1.5 * needed_s + 2


def test_clients_that_find_a_queue_without_room_have_places_too() -> None:
    burst = [Client(f"10.0.0.{at}:1", at * 0.001) for at in range(100)]
    play(Vectors(per_s=10, room=8), burst)
    refused = [each for each in burst if each.tries > 1]
    assert sum(each.tries == 2 for each in refused) >= 0.95 * len(refused)


def test_promises_are_bounded_and_end() -> None:
    promises = Promises()
    for number in range(5000):
        promises.make(f"10.0.0.{number % 9}:{number}", 0.0, 10.0, 1.0)
    assert len(promises) == 1024
    assert promises.wait_s("10.0.0.9:1", 0.0, 5.0, 1.0) == 5, "which is before all of them"
    assert promises.wait_s("10.0.0.9:1", 0.0, 10.0, 1.0) == 19, "of each other client as much as the request itself"
    assert promises.wait_s("10.0.0.9:1", 17.0, 10.0, 1.0) == 10
    assert not promises
