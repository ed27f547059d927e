"""The simulation gives what queueing theory says where it says something, and is used where it does not."""

import math
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.capacity import fleet
from loadtest.capacity.fleet import Routing, constant, exponential, simulate
from loadtest.errors import LoadtestError
from service.pools.replicas import HEARTBEAT_S
from tests.loadtest.capacity.test_tables import ramp
from tests.loadtest.load.made_up import late, steps

REQUESTS = 200_000
NEAR = 0.085  # of the formula: four standard errors of the mean of an M/M/1 queue at 80 % load over so many requests (waits are correlated)


# Rates per second, times in seconds.


def mm1_mean_s(arrivals: float, rate: float) -> float:
    """Mean time in an M/M/1 queue, service included: 1 / (mu - lambda)."""
    return 1 / (rate - arrivals)


def mm1_percentile_s(arrivals: float, rate: float, share: float) -> float:
    """The time in an M/M/1 queue is exponential: -ln(1 - share) / (mu - lambda)."""
    return -math.log(1 - share) / (rate - arrivals)


def md1_mean_s(arrivals: float, rate: float) -> float:
    """Mean time in an M/D/1 queue, service included (Pollaczek and Khinchine with no variance): 1/mu + rho / (2 mu (1 - rho))."""
    rho = arrivals / rate
    return 1 / rate + rho / (2 * rate * (1 - rho))


def mean_s(times: fleet.Times) -> float:
    return sum(times.times_s) / len(times.times_s)


def outcome(arrivals: float, service: fleet.Draw, replicas: int = 1, routing: Routing = Routing.random) -> fleet.Times:
    return simulate(arrivals=arrivals, replicas=replicas, service=service, routing=routing, requests=REQUESTS, seed=0)


@pytest.mark.parametrize("arrivals", [20.0, 50.0, 80.0])
def test_one_replica_with_exponential_times_is_m_m_1(arrivals: float):
    found = outcome(arrivals, exponential(0.01))
    assert mean_s(found) == pytest.approx(mm1_mean_s(arrivals, 100), rel=NEAR)
    assert found.percentile_s(0.99) == pytest.approx(mm1_percentile_s(arrivals, 100, 0.99), rel=2 * NEAR)


@pytest.mark.parametrize("arrivals", [20.0, 50.0, 80.0])
def test_one_replica_with_times_all_alike_is_m_d_1(arrivals: float):
    assert mean_s(outcome(arrivals, constant(0.01))) == pytest.approx(md1_mean_s(arrivals, 100), rel=NEAR)


def test_random_routing_makes_queues_of_their_own():
    """A Poisson process split at random is Poisson processes: ten replicas are ten M/M/1."""
    assert mean_s(outcome(500.0, exponential(0.01), replicas=10)) == pytest.approx(mm1_mean_s(50, 100), rel=NEAR)


def test_two_choices_are_much_better_than_one_and_least_connections_a_little_better_still():
    one, two, least = (mean_s(outcome(900.0, exponential(0.01), replicas=10, routing=routing)) for routing in Routing)
    assert two < one / 2
    assert least < two


def test_the_same_seed_gives_the_same_fleet():
    def times_s(seed: int) -> list[float]:
        fleet_of = {"arrivals": 500.0, "replicas": 10, "service": exponential(0.01), "routing": Routing.two_choices, "requests": 5000}
        return simulate(**fleet_of, seed=seed).times_s

    assert times_s(0) == times_s(0)
    assert times_s(0) != times_s(1)


def test_replicas_are_as_many_as_the_formula_says():
    """Random routing, exponential times: the p99 of M/M/1 is within 100 ms when ln(100) / (mu - lambda) is."""
    asked = {"arrivals": 1000.0, "replica": 100.0, "p99_s": 0.1, "service": exponential(0.01), "requests": 50_000, "seed": 0}
    count = fleet.replicas_for(routing=Routing.random, **asked)
    exact = next(n for n in range(11, 100) if mm1_percentile_s(1000 / n, 100, 0.99) <= 0.1)
    assert abs(count - exact) <= 1
    assert fleet.replicas_for(routing=Routing.least, **asked) < count


def test_a_bound_that_an_idle_replica_misses_is_refused():
    asked = {"arrivals": 1000.0, "replica": 100.0, "service": exponential(0.01), "requests": 1000, "seed": 0}
    with pytest.raises(LoadtestError, match="cannot be reached"):
        fleet.replicas_for(p99_s=0.01, routing=Routing.random, **asked)


def test_the_command_tells_replicas_and_cores(tmp_path: Path):
    asked = [str(ramp(tmp_path)), "--per-minute", "6000", "--p99-ms", "1000", "--requests", "2000"]
    ended = CliRunner().invoke(fleet.app, asked)
    assert ended.exit_code == 0, ended.output
    assert "two choices" in ended.output
    assert "haproxy" in ended.output


def test_a_knee_that_was_not_judged_is_no_fleet(tmp_path: Path):
    file = ramp(tmp_path, stages=[step.model_dump() for step in late(steps((10, 0), (20, 0), (900, 0)), "x3", 252.0)])
    ended = CliRunner().invoke(fleet.app, [str(file), "--requests", "2000"])
    assert isinstance(ended.exception, LoadtestError)
    assert "252 ms late" in str(ended.exception)


def test_the_page_counts_what_nodes_ask_of_each_other():
    """By the intervals of the installed Ray, which is not imported for it, and of the pools."""
    ray = find_spec("ray")
    assert ray is not None
    constants = Path(str(ray.origin)).parent.joinpath("serve", "_private", "constants.py").read_text()
    (interval,) = re.findall(r'"RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER", "(\w+)"', constants)
    assert interval == f"{fleet.CHECK_EVERY_S:g}s"
    assert fleet.HEARTBEAT_EVERY_S == HEARTBEAT_S
    page = (Path(__file__).parents[3] / "docs" / "capacity.md").read_text()
    for nodes in fleet.NODES:
        checks, beats = fleet.control_traffic(nodes)
        assert f"| {nodes:,} | {checks:,.0f} | {checks / nodes:,.0f} | {beats:,.0f} | {beats / nodes:,.0f} |" in page


@pytest.mark.parametrize("asked", [[], ["run.json", "--replica", "200"]], ids=["neither", "both"])
def test_the_command_needs_a_run_or_a_rate(asked: list[str]):
    ended = CliRunner().invoke(fleet.app, asked)
    assert ended.exit_code == 2
    assert "--replica" in ended.output
