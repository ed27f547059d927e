"""Computes how many replicas a fleet needs, from the measurements of one replica, by a simulation with a seed.

    python -m loadtest.capacity.fleet out/load/DATE-ramp/run.json --per-minute 1000000 --p99-ms 100

A replica is modelled as a queue with one server, at the rate measured at its knee. This rate includes the gain by batching, so a single
request takes longer than in the model. Requests arrive in a Poisson process and go to a random replica, to the shorter of two random
queues (power of two choices), or to the shortest queue (least connections). Tests compare the simulation with the formulas for M/M/1 and
M/D/1 queues.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from loadtest.capacity import tables
from loadtest.common.terminal import run as run_command
from loadtest.common.terminal import stdout
from loadtest.errors import LoadtestError
from service.terminal import command_app

Draw = Callable[[random.Random], float]


class Routing(StrEnum):
    random = "random"
    two_choices = "two choices"
    least = "least connections"


# Simulation ------------------------------------------------------------------------------------------------------------------------------


def exponential(mean_s: float) -> Draw:
    return lambda draw: draw.expovariate(1 / mean_s)


def constant(mean_s: float) -> Draw:
    return lambda draw: mean_s


@dataclass(frozen=True)
class Times:
    """The seconds that each request spends in the system, from arrival to answer, sorted."""

    times_s: list[float]

    def percentile_s(self, share: float) -> float:
        return self.times_s[min(int(share * len(self.times_s)), len(self.times_s) - 1)]


def simulate(*, arrivals: float, replicas: int, service: Draw, routing: Routing, requests: int, seed: int) -> Times:
    """Simulate `arrivals` requests/s to a fleet whose replicas each serve one request at a time, in order of arrival. `service` draws the
    seconds of one request. The first tenth of the requests is not counted."""
    draw = random.Random(seed)
    now, times = 0.0, []
    free_at, held = [0.0] * replicas, [0] * replicas
    ends: list[tuple[float, int]] = []  # (end, replica) of every request in the system
    for number in range(requests):
        now += draw.expovariate(arrivals)
        while ends and ends[0][0] <= now:
            held[heapq.heappop(ends)[1]] -= 1
        to = _route(routing, held, draw)
        free_at[to] = max(free_at[to], now) + service(draw)
        held[to] += 1
        heapq.heappush(ends, (free_at[to], to))
        if number >= requests // 10:
            times.append(free_at[to] - now)
    return Times(sorted(times))


def _route(routing: Routing, held: list[int], draw: random.Random) -> int:
    if routing == Routing.random or len(held) == 1:
        return draw.randrange(len(held))
    if routing == Routing.two_choices:
        one, other = draw.sample(range(len(held)), 2)
        return one if held[one] <= held[other] else other
    least = min(held)
    return draw.choice([at for at, count in enumerate(held) if count == least])


# A fleet --------------------------------------------------------------------------------------------------------------------------------


def replicas_for(*, arrivals: float, replica: float, p99_s: float, routing: Routing, service: Draw, requests: int, seed: int) -> int:
    """Return the smallest number of replicas, each of which serves `replica` requests/s, with which the p99 is at most `p99_s`. Raises
    LoadtestError if the p99 is larger even on an idle replica."""
    idle = simulate(arrivals=1e-3 * replica, replicas=1, service=service, routing=routing, requests=10_000, seed=seed).percentile_s(0.99)
    if idle > p99_s:
        raise LoadtestError(
            f"a p99 of {p99_s * 1000:g} ms cannot be reached: an idle replica of {replica:g}/s takes {idle * 1000:.0f} ms already"
        )

    def enough(count: int) -> bool:
        outcome = simulate(arrivals=arrivals, replicas=count, service=service, routing=routing, requests=requests, seed=seed)
        return outcome.percentile_s(0.99) <= p99_s

    low = math.floor(arrivals / replica)  # with so few replicas all are always busy, and the queue grows without end
    step = 1
    while not enough(low + step):
        low, step = low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


class ControlTraffic(NamedTuple):
    """Messages per second between the nodes of one cluster. They are also sent when the cluster is idle."""

    checks: float  # health checks per second that the nodes' HAProxies send to the gateways
    heartbeats: float  # heartbeats per second between all gateways and all encoders and generators


# The values of RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER in Ray and of HEARTBEAT_S in service/pools/replicas.py.
CHECK_EVERY_S, HEARTBEAT_EVERY_S = 5.0, 1.0
POOLS = 2
NODES = (10, 50, 100, 1000)


def control_traffic(nodes: int) -> ControlTraffic:
    """Return the messages per second of a cluster with a gateway, an encoder and a generator on each node."""
    return ControlTraffic(nodes**2 / CHECK_EVERY_S, POOLS * nodes**2 / HEARTBEAT_EVERY_S)


app = command_app()
SPARE = 0.25  # share of the fleet that is kept in reserve, for a node lost during an update, or for a day with a higher peak


@app.command()
def fleet(
    run: Annotated[Path | None, typer.Argument(help="run.json of `attnserve load --shape ramp` against one replica.")] = None,
    replica: Annotated[float | None, typer.Option(min=0.1, help="Instead of a run: requests/s of one replica at its knee.")] = None,
    per_minute: Annotated[float, typer.Option(min=1, help="Requests a minute that the fleet has to carry.")] = 1_000_000,
    p99_ms: Annotated[float, typer.Option(min=0.1, help="Bound of the p99, of which queues are a part.")] = 100,
    requests: Annotated[int, typer.Option(min=1000, help="Requests of each simulation.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 0,
) -> None:
    """Print how many replicas answer a load within a p99 latency, by routing method, and how many cores the fleet's other parts need."""
    arrivals = per_minute / 60
    if (run is None) == (replica is None):
        raise typer.BadParameter("give either a run.json or --replica")
    ramp = tables.read(run) if run else None
    if ramp and ramp.knee.late_ms is not None:
        late = f"the generator was {ramp.knee.late_ms:,.0f} ms late where the knee of {run} would be"
        raise LoadtestError(f"{late}, so its knee is not valid: repeat the ramp with --workers, or give --replica")
    rate = ramp.knee.rate if ramp else replica
    assert rate is not None
    console = stdout(width=150)
    title = f"{arrivals:,.0f} requests/s, replicas of {rate:,.1f}/s, p99 within {p99_ms:g} ms"
    table = Table("routing", "times of service", "replicas", "busy", f"with {SPARE:.0%} to spare", title=title, title_justify="left")
    for routing in Routing:
        for name, service in (("all alike", constant(1 / rate)), ("exponential", exponential(1 / rate))):
            count = replicas_for(
                arrivals=arrivals, replica=rate, p99_s=p99_ms / 1000, routing=routing, service=service, requests=requests, seed=seed
            )
            busy = arrivals / (count * rate)
            table.add_row(routing, name, f"{count:,}", f"{busy:.0%}", f"{math.ceil(count / (1 - SPARE)):,}")
    console.print(table)
    nodes = Table("workers of one cluster", "health checks/s", "by each gateway", "heartbeats/s", "by each gateway", title_justify="left")
    for count in NODES:
        traffic = control_traffic(count)
        cells = (traffic.checks, traffic.checks / count, traffic.heartbeats, traffic.heartbeats / count)
        nodes.add_row(f"{count:,}", *(f"{each:,.0f}" for each in cells))
    console.print(nodes)
    if ramp is None:
        return
    parts = Table("part of the service", "cores of each, always", "core-ms a request on top", "cores for all requests")
    for part in tables.process_costs(ramp):
        parts.add_row(part.name, f"{part.fixed_cores:.3f}", f"{part.core_ms:.3f}", f"{arrivals * part.core_ms / 1000:,.1f}")
    console.print(parts)


if __name__ == "__main__":
    run_command(app, "python -m loadtest.capacity.fleet")
