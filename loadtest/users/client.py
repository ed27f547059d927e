"""What every kind of client has in common: when it sends, how its request is timed, and what is noted of the answer."""

import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import gevent
from gevent.pool import Pool
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPSocketResponse
from locust import User, task
from locust.env import Environment

from loadtest.load.plan import Plan
from loadtest.load.samples import Sample
from loadtest.users.recorder import RECORDER, Sent

MOST_CONNECTIONS = 8000  # a generator that holds more has long lost its race with the arrivals
ON_THEIR_WAY = Pool(MOST_CONNECTIONS)  # requests outlive the users that sent them: a shape that goes down cuts none off
_numbers: Counter[str] = Counter()


@cache
def plan_of(text: str) -> Plan:
    return Plan.model_validate_json(text)


@cache
def http(url: str, timeout_s: float) -> HTTPClient:
    """One pool of kept-alive connections for all users of the process."""
    return HTTPClient.from_url(url, concurrency=MOST_CONNECTIONS, network_timeout=timeout_s, connection_timeout=timeout_s)


@dataclass
class Answer:
    """What a client finds out about one request. `problem` is why it is no good answer."""

    status: int = 0
    size_bytes: int = 0
    tokens: int = 0
    retry_after: bool = False
    first_ms: float | None = None
    between_ms: float | None = None
    longest_ms: float | None = None
    problem: str = ""
    metrics: dict[str, float] = field(default_factory=dict)  # further rows of Locust's own tables


class Client(User):
    """One client, or in open loop one Poisson source of requests of its kind. A subclass says what it sends in `ask`."""

    abstract = True
    kind: ClassVar[str]
    task_name: ClassVar[str]  # which of the plan's models it needs; "" for any

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        assert environment.parsed_options is not None
        assert environment.runner is not None
        self.plan = plan_of(environment.parsed_options.plan)
        number = _numbers[self.kind] = _numbers[self.kind] + 1
        self.draw = random.Random(f"{self.plan.seed} {self.kind} {environment.runner.worker_index} {number}")
        self.http = http(self.plan.url, self.plan.timeout_s)
        self._due_s = time.time()
        self._turns = 0

    @property
    def model(self) -> str:
        return self.plan.models[self.task_name]

    @task
    def turn(self) -> None:
        """The next request: in open loop when it arrives, whatever became of the last one; in closed loop when the last one is answered."""
        if self.plan.open_loop:
            self._due_s += self.draw.expovariate(self.plan.source_rate)
            gevent.sleep(max(self._due_s - time.time(), 0))
            if ON_THEIR_WAY.full():
                raise RuntimeError(f"{MOST_CONNECTIONS} requests are on their way: add workers (--workers) or ask for less")
            ON_THEIR_WAY.spawn(self.send, self._due_s)
        elif self.plan.turns is None or self._turns < self.plan.turns:
            self._turns += 1
            ON_THEIR_WAY.spawn(self.send, time.time()).join()
        else:
            gevent.sleep(self.plan.timeout_s)

    def send(self, due_s: float) -> None:
        """Ask, and note what came of it. Whatever goes wrong on the way is an answer with status 0."""
        late_ms = max(time.time() - due_s, 0) * 1000
        number = RECORDER.sent(Sent(self.kind, due_s, late_ms))
        answer = Answer()
        try:
            with gevent.Timeout(self.plan.timeout_s):
                self.ask(answer)
        except (Exception, gevent.Timeout) as error:
            answer.status, answer.problem = 0, f"{type(error).__name__}: {error}"
        ms = (time.time() - due_s) * 1000
        RECORDER.ended(
            number,
            Sample(
                kind=self.kind,
                due_s=due_s,
                ms=ms,
                late_ms=late_ms,
                status=answer.status,
                tokens=answer.tokens,
                retry_after=answer.retry_after,
                first_ms=answer.first_ms,
                between_ms=answer.between_ms,
                longest_ms=answer.longest_ms,
                problem=answer.problem,
            ),
        )
        self._tell_locust(answer, ms)

    def ask(self, answer: Answer) -> None:
        """One request; fills in `answer`."""
        raise NotImplementedError

    def post(self, path: str, body: Any, answer: Answer) -> HTTPSocketResponse:
        """Send `body` as JSON, and wait for the head of the answer. The caller reads the rest."""
        response = self.http.request("POST", path, body=json.dumps(body).encode(), headers=headers())
        answer.status = response.status_code
        answer.retry_after = response.get("retry-after") is not None
        return response

    def post_json(self, path: str, body: Any, answer: Answer) -> Any:
        """The same, with the whole answer read; None unless its status is 200."""
        response = self.post(path, body, answer)
        content = bytes(response.read())
        answer.size_bytes = len(content)
        return refused(content, answer) if answer.status != 200 else json.loads(content)

    def _tell_locust(self, answer: Answer, ms: float) -> None:
        """Its own tables: a refusal is a row of its own and no failure, and further metrics are rows as well."""
        fire = self.environment.events.request.fire
        name = f"{self.kind} (refused)" if answer.status == 429 else self.kind
        problem = RuntimeError(answer.problem) if answer.problem else None
        fire(request_type="POST", name=name, response_time=ms, response_length=answer.size_bytes, exception=problem, context={})
        for metric, value in answer.metrics.items():
            fire(request_type="metric", name=f"{self.kind}: {metric}", response_time=value, response_length=0, exception=None, context={})


def headers() -> dict[str, str]:
    key = os.environ.get("LOADTEST_API_KEY")
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def refused(content: bytes, answer: Answer) -> None:
    """What an answer that is not 200 means: 429 is an answer, everything else a problem."""
    if answer.status != 429:
        answer.problem = f"{answer.status} {content[:200].decode(errors='replace')}"
