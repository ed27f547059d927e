"""The locustfile of `attnserve load`: its clients follow a load plan, and record a sample (the measurements) of each request.

    locust -f loadtest/users/planned.py --headless --plan JSON

Locust's worker processes get the plan from their master process. Only clients of the kinds in the plan's mix are spawned.
"""

import sys
import time
from functools import cache
from pathlib import Path
from types import new_class

# Add the repository root to sys.path: Locust adds only this file's folder, and a worker process may start in any working directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gevent
from gevent.pool import Pool
from locust import LoadTestShape, constant, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtest.load import samples
from loadtest.load.plan import LoadPlan
from loadtest.load.samples import Sample
from loadtest.users import USERS
from loadtest.users.client import MOST_CONNECTIONS, Answer, Client
from loadtest.users.crowd import Crowd
from loadtest.users.recorder import RECORDER
from loadtest.users.request_settings import RequestSettings, add_key

IN_FLIGHT = Pool(MOST_CONNECTIONS)  # each request runs in its own greenlet, so that it continues when Locust stops its user


@cache
def plan_of(text: str) -> LoadPlan:
    return LoadPlan.model_validate_json(text)


def plan_in(environment: Environment) -> LoadPlan:
    assert environment.parsed_options is not None
    return plan_of(environment.parsed_options.plan)


class Planned(Client):
    """A client that follows the plan. In open loop it sends requests as a Poisson process, in closed loop one after the other."""

    abstract = True
    wait_time = constant(0)

    def on_start(self) -> None:
        super().on_start()
        self.plan = plan_in(self.environment)
        self._due_s = time.time()
        self._turns = 0

    def turn(self) -> None:
        """Send the next request: in open loop at its arrival time, in closed loop when the previous request has been answered."""
        if self.plan.open_loop:
            self._due_s += self.draw.expovariate(self.plan.source_rate)
            gevent.sleep(max(self._due_s - time.time(), 0))
            if IN_FLIGHT.full():
                raise RuntimeError(
                    f"{MOST_CONNECTIONS} requests are in flight, the most of one process: add workers (--workers), or lower the rate"
                )
            IN_FLIGHT.spawn(self.send, self._due_s)
        elif self.plan.turns is None or self._turns < self.plan.turns:
            self._turns += 1
            IN_FLIGHT.spawn(self.send, time.time()).join()
        else:
            gevent.sleep(self.plan.timeout_s)

    def send(self, due_s: float) -> Answer:
        """Send a request as `Client.send` does, and record a sample of it."""
        late_ms = max(time.time() - due_s, 0) * 1000
        number = RECORDER.sent(self.kind, due_s, late_ms)
        answer = super().send(due_s)
        found = {name: value for name, value in vars(answer).items() if name in Sample._fields}
        RECORDER.ended(number, Sample(kind=self.kind, due_s=due_s, late_ms=late_ms, **found))
        return answer


CLASSES: dict[str, type[Planned]] = {user.kind: new_class(user.__name__, (Planned, user)) for user in USERS}
globals().update({user.__name__: user for user in CLASSES.values()})  # Locust looks for user classes among this module's names


def add_option(parser: LocustArgumentParser) -> None:
    parser.add_argument("--plan", default="", help="A loadtest.load.plan.LoadPlan as JSON; a worker gets its master's.")
    add_key(parser)


def begin(environment: Environment, **_: object) -> None:
    assert environment.parsed_options is not None
    if not environment.parsed_options.plan:  # this process is a worker
        RECORDER.attach(environment, None)
        return
    plan = plan_in(environment)
    RECORDER.attach(environment, plan.out)
    for kind, user in CLASSES.items():
        user.weight = plan.mix.get(kind, 0)
    environment.user_classes = [user for kind, user in CLASSES.items() if kind in plan.mix]


def share_settings(environment: Environment, **_: object) -> None:
    assert environment.parsed_options is not None
    Client.settings = settings_of(plan_in(environment), environment.parsed_options.api_key)


def settings_of(plan: LoadPlan, key: str) -> RequestSettings:
    return RequestSettings(plan.url, plan.models, plan.seed, plan.words, plan.max_tokens, plan.timeout_s, key)


class Stages(LoadTestShape):
    """Tells Locust the number of users over time, by the plan's stages. A last stage without arrivals ends when no request is in flight."""

    _at, _end_s = -1, 0.0

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        plan = plan_in(self.runner.environment)
        if self._at < 0:
            assert self.runner.environment.parsed_options is not None
            self._crowd = Crowd(settings_of(plan, self.runner.environment.parsed_options.api_key))
        now = time.time()
        drained = self._at == len(plan.stages) - 1 and plan.stages[-1].level == 0 and not RECORDER.in_flight
        if now >= self._end_s or drained:
            self._at += 1
            if self._at == len(plan.stages):
                return None
            stage = plan.stages[self._at]
            self._end_s = now + stage.seconds
            samples.begin(plan.out, samples.StageStart(stage.name, stage.level, plan.users(stage.level), time.time()))
            self._crowd.become(stage)
        users = plan.users(plan.stages[self._at].level)
        return users, max(users, self.runner.user_count, 1)


events.init_command_line_parser.add_listener(add_option)
events.init.add_listener(begin)
events.test_start.add_listener(share_settings)
