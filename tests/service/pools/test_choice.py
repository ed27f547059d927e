"""How long runs wait for a slot, by which generator gateways send them to: the project's own choice, on a clock of the test."""

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from service.pools.replicas import HEARTBEAT_S, Replica, Replicas

KEY = ("wordy", "abc")
GENERATORS, SLOTS, RUN_S = 32, 32, 8.0


class Named:
    """A pool of names alone."""

    def __init__(self) -> None:
        self.names = tuple(f"generator {number}" for number in range(GENERATORS))

    def replicas(self) -> tuple[str, ...]:
        return self.names

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        raise NotImplementedError

    stream = call


Choose = Callable[[Replicas, int, Mapping[str, int]], Replica]


def freest(gateway: Replicas, number: int, busy: Mapping[str, int]) -> Replica:
    """As `PoolGenerator` sends a stream without a session: where the first has no slot free, to another."""
    first = gateway.freest(KEY)
    return first if busy[first.name] < SLOTS else gateway.freest(KEY, [first])


def waits(use: float, choose: Choose, *, gateways_there: int = 1, runs: int = 15_000) -> float:
    """Of runs that come at random and take RUN_S on average, the share that found no free slot, where they use so much of all slots.

    Gateways know their own runs at once, those of others by heartbeats.
    """
    chance = random.Random(5)
    random.seed(5)
    gateways = [Replicas(Named()) for _ in range(gateways_there)]  # type: ignore[arg-type]
    for gateway in gateways:
        gateway.freest(KEY)  # it knows its replicas from the first look on
    busy: dict[str, int] = dict.fromkeys(Named().names, 0)
    queues: dict[str, deque[tuple[Replica, float]]] = {name: deque() for name in busy}
    ends: list[tuple[float, int, Replica]] = []
    now, beat, waited = 0.0, 0.0, 0

    def begin(replica: Replica, lasts_s: float, number: int) -> None:
        busy[replica.name] += 1
        heapq.heappush(ends, (now + lasts_s, number, replica))

    for number in range(runs):
        comes = now + chance.expovariate(use * GENERATORS * SLOTS / RUN_S)
        while ends and ends[0][0] <= comes:
            now, _, replica = heapq.heappop(ends)
            replica.runs[KEY] -= 1
            busy[replica.name] -= 1
            if queues[replica.name]:
                begin(*queues[replica.name].popleft(), number=-len(ends))
        now = comes
        if now - beat > HEARTBEAT_S:
            beat = now
            for gateway in gateways:
                for replica in gateway._replicas.values():
                    there = busy[replica.name] + len(queues[replica.name])
                    replica.others = {KEY: there - replica.runs[KEY]}
        replica = choose(gateways[chance.randrange(len(gateways))], number, busy)
        replica.runs[KEY] += 1
        lasts_s = chance.expovariate(1 / RUN_S)
        if busy[replica.name] < SLOTS:
            begin(replica, lasts_s, number)
        else:
            waited += 1
            queues[replica.name].append((replica, lasts_s))
    return waited / runs


@pytest.mark.parametrize(("use", "gateways", "most"), [(0.8, 1, 0.0), (0.9, 1, 0.01), (0.8, 4, 0.001), (0.9, 4, 0.01)])
def test_streams_without_a_session_hardly_wait_while_others_are_free(use: float, gateways: int, most: float) -> None:
    """Also where three quarters of what there is belongs to other gateways, of which this one knows a second late."""
    assert waits(use, freest, gateways_there=gateways) <= most
