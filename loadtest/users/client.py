"""The base class of all kinds of clients: a Locust user that sends a request, waits for the answer, pauses and repeats."""

import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import gevent
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPSocketResponse
from locust import User, between, tag
from locust.exception import StopUser

from loadtest.load.kinds import KINDS
from loadtest.users import measurements
from loadtest.users.request_settings import RequestSettings

MOST_CONNECTIONS = 8000  # largest number of connections of one process; with more, it cannot send its requests on time
_numbers: Counter[str] = Counter()


@cache
def http(url: str, timeout_s: float) -> HTTPClient:
    """Return a pool of kept-alive connections to `url`, which all Locust users of the process share."""
    return HTTPClient.from_url(url, concurrency=MOST_CONNECTIONS, network_timeout=timeout_s, connection_timeout=timeout_s)


@dataclass
class Answer:
    """The outcome of one request. `problem` is the reason why the request counts as failed; empty if it does not."""

    status: int = 0
    size_bytes: int = 0
    tokens: int = 0
    retry_after: bool = False
    first_ms: float | None = None
    between_ms: float | None = None
    longest_ms: float | None = None
    problem: str = ""
    ms: float = 0.0  # milliseconds since the request was due
    metrics: dict[str, float] = field(default_factory=dict)  # rows of `measurements.py`


class Client(User):
    """One client with one request at a time. A subclass has a `kind`, and sends its request in `ask`.

    All clients share `settings`, which the locustfile sets when a test starts, before it creates users.
    """

    abstract = True
    host = "http://127.0.0.1:8000"
    wait_time = between(0.5, 1.5)  # a user sends about one request per second if the service answers fast
    kind: ClassVar[str]
    settings: ClassVar[RequestSettings | None] = None

    def __init_subclass__(cls) -> None:
        """Give each subclass with a kind its only task (to send requests), and the weight and tags of `loadtest/load/kinds.py`."""
        super().__init_subclass__()
        if kind := KINDS.get(getattr(cls, "kind", "")):

            def request(self: "Client") -> None:
                self.turn()

            cls.weight, cls.tasks = kind.share, [tag(*kind.tags)(request)]

    def on_start(self) -> None:
        """Prepare the client. Raises StopUser if no model can answer its requests, RuntimeError if the service's models are unknown."""
        if not self.answerable(self.shared):
            raise StopUser
        assert self.environment.runner is not None
        number = _numbers[self.kind] = _numbers[self.kind] + 1
        seed = self.shared.seed
        self.draw = random.Random(None if seed is None else f"{seed} {self.kind} {self.environment.runner.worker_index} {number}")
        self.http = http(self.shared.url, self.shared.timeout_s)

    @property
    def shared(self) -> RequestSettings:
        """The shared settings. Raises RuntimeError if this process could not query the service's models."""
        if Client.settings is None:
            raise RuntimeError("this process could not query the service's models: see its log")
        return Client.settings

    @property
    def model(self) -> str:
        return self.shared.models[KINDS[self.kind].task]

    @classmethod
    def answerable(cls, settings: RequestSettings) -> bool:
        """Return whether a model of the service can answer the requests of this kind of client."""
        task = KINDS[cls.kind].task
        return not task or task in settings.models

    def turn(self) -> None:
        """Send one request and wait for its answer."""
        self.send(time.time())

    def send(self, due_s: float) -> Answer:
        """Send a request that is due at `due_s` (`time.time()`), and report its outcome to Locust. An exception counts as an answer with
        status 0."""
        answer = Answer()
        try:
            with gevent.Timeout(self.shared.timeout_s):
                self.ask(answer)
        except (Exception, gevent.Timeout) as error:
            answer.status, answer.problem = 0, f"{type(error).__name__}: {error}"
        answer.ms = (time.time() - due_s) * 1000
        self._tell_locust(answer)
        return answer

    def ask(self, answer: Answer) -> None:
        """Send one request and write its outcome to `answer`."""
        raise NotImplementedError

    def post(self, path: str, body: Any, answer: Answer) -> HTTPSocketResponse:
        """Send `body` as JSON, and return the response when its headers have arrived. The caller reads its content."""
        response = self.http.request("POST", path, body=json.dumps(body).encode(), headers=self.shared.headers)
        answer.status = response.status_code
        answer.retry_after = response.get("retry-after") is not None
        return response

    def post_json(self, path: str, body: Any, answer: Answer) -> Any:
        """Send `body` as JSON and return the parsed answer, or None if its status is not 200."""
        response = self.post(path, body, answer)
        content = bytes(response.read())
        answer.size_bytes = len(content)
        return refused(content, answer) if answer.status != 200 else json.loads(content)

    def _tell_locust(self, answer: Answer) -> None:
        """Report the answer to Locust's tables. Refusals (429), which do not count as failures, get their own rows, and what a
        stream measures is noted in its own table."""
        fire = self.environment.events.request.fire
        name = f"{self.kind} (refused)" if answer.status == 429 else self.kind
        problem = RuntimeError(answer.problem) if answer.problem else None
        fire(request_type="POST", name=name, response_time=answer.ms, response_length=answer.size_bytes, exception=problem, context={})
        for measurement, value in answer.metrics.items():
            measurements.note(self.kind, measurement, value)


def refused(content: bytes, answer: Answer) -> None:
    """Record an answer whose status is not 200. A 429 is a refusal and does not count as a failure; every other status does."""
    if answer.status != 429:
        answer.problem = f"{answer.status} {content[:200].decode(errors='replace')}"
