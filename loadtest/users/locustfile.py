"""What `locust -f` reads: all kinds of clients, the plan as an option, and the shape that plays its stages.

Workers get the plan from their master. Only the kinds of the plan's mix are spawned.
"""

import time
from pathlib import Path

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtest.load import samples
from loadtest.load.plan import Stage
from loadtest.users.client import Client, plan_of
from loadtest.users.crowd import Crowd
from loadtest.users.embeddings import Documents, Embed, EmbedBatch, EmbedMixed
from loadtest.users.hostile import Hostile
from loadtest.users.recorder import RECORDER
from loadtest.users.rerank import Rerank
from loadtest.users.streams import Chat, Completion

KINDS: dict[str, type[Client]] = {each.kind: each for each in (Embed, EmbedBatch, EmbedMixed, Documents, Rerank, Completion, Chat, Hostile)}


@events.init_command_line_parser.add_listener
def add_option(parser: LocustArgumentParser) -> None:
    parser.add_argument("--plan", default="", help="A loadtest.load.plan.Plan as JSON; a worker gets its master's.")


@events.init.add_listener
def begin(environment: Environment, **_: object) -> None:
    assert environment.parsed_options is not None
    if not environment.parsed_options.plan:  # a worker
        RECORDER.attach(environment, None)
        return
    plan = plan_of(environment.parsed_options.plan)
    RECORDER.attach(environment, plan.out)
    for kind, user in KINDS.items():
        user.weight = plan.mix.get(kind, 0)
    environment.user_classes = [user for kind, user in KINDS.items() if kind in plan.mix]


class Stages(LoadTestShape):
    """The plan's stages, one after the other. The last one, in which nothing arrives, ends as soon as nothing is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self._at = -1
        self._end_s = 0.0

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        assert self.runner.environment.parsed_options is not None
        plan = plan_of(self.runner.environment.parsed_options.plan)
        if self._at < 0:
            self._crowd = Crowd(plan)
        now = time.time()
        drained = self._at == len(plan.stages) - 1 and plan.stages[-1].level == 0 and not RECORDER.in_flight
        if now >= self._end_s or drained:
            self._at += 1
            if self._at == len(plan.stages):
                return None
            stage = plan.stages[self._at]
            self._end_s = now + stage.seconds
            self._begin(stage, plan.users(stage.level), plan.out)
            self._crowd.become(stage)
        users = plan.users(plan.stages[self._at].level)
        return users, max(users, self.runner.user_count, 1)

    def _begin(self, stage: Stage, users: int, out: Path) -> None:
        samples.begin(out, samples.Begun(stage.name, stage.level, users, time.time()))
