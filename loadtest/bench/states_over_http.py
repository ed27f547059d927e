"""Measures states over HTTP, as one client sees them: the time to the first token after a prompt, a stored state, or a fork of this state.

The service reads every state from its store, because the prefix cache and the in-memory cache of recently used states are off. All times
are in milliseconds. The requests of a measurement follow one another on one kept-alive connection.
"""

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from loadtest.common.server import MeasuredServer
from loadtest.errors import LoadtestError

FLAGS = ("--set", "prefix_cache_bytes=0", "--set", "hot_state_bytes=0")
REPEATS = 30
LONG_REPEATS = 3
STEPS = 500  # number of decode steps over which the time of one step is averaged


@dataclass(frozen=True)
class OverHttp:
    """Median times in milliseconds.

    `restored` and `forked`: context length in tokens -> time to the first token after a stored state or a new fork of it. `one` and
    `again`: time to the first token after a prompt of one token and after a long prompt. `step`: one decode step.
    """

    restored: dict[int, float]
    forked: dict[int, float]
    one: float
    again: float
    step: float


def measure(server: MeasuredServer, contexts: Sequence[int], long: int, vocab_size: int, seed: int) -> OverHttp:
    """Measure the service with states of the lengths `contexts`. `long` is the length of the long prompt. Both are in tokens."""
    client, seeded = _Client(server), random.Random(seed)

    def prompt(tokens: int) -> list[int]:
        return [seeded.randrange(vocab_size) for _ in range(tokens)]

    states = {context: client.state("/v1/states", token_ids=prompt(context)) for context in contexts}
    for _ in range(3):  # warm up, because the first requests are slower
        client.first_token(prompt(1))
    restored: dict[int, list[float]] = {context: [] for context in contexts}
    forked: dict[int, list[float]] = {context: [] for context in contexts}
    one = []
    for _ in range(REPEATS):
        one.append(client.first_token(prompt(1)))
        for context, state in states.items():
            restored[context].append(client.first_token("", state=state))
            forked[context].append(client.first_token("", state=client.state(f"/v1/states/{state}/fork")))
    again = [client.first_token(prompt(long)) for _ in range(LONG_REPEATS)]
    step = client.step()
    client.close()
    medians = statistics.median
    return OverHttp(
        restored={context: medians(each) for context, each in restored.items()},
        forked={context: medians(each) for context, each in forked.items()},
        one=medians(one),
        again=medians(again),
        step=step,
    )


class _Client:
    def __init__(self, server: MeasuredServer) -> None:
        self._connection = HTTPConnection("127.0.0.1", server.port, timeout=600)
        self._model = server.model

    def close(self) -> None:
        self._connection.close()

    def state(self, path: str, **fields: Any) -> str:
        """Create a state by a POST to `path`, and return the state's id."""
        made = json.loads(self._post(path, {"model": self._model, **fields} if fields else {}).read())
        return str(made["data"][0]["id"] if "data" in made else made["id"])

    def first_token(self, prompt: str | list[int], **fields: Any) -> float:
        """Return the milliseconds from the request to the first event of the stream."""
        asked = {"model": self._model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True, "stream": True, "seed": 0, **fields}
        started = time.perf_counter()
        answer = self._post("/v1/completions", asked)
        while not (line := answer.readline()).startswith(b"data:"):
            if not line:
                raise LoadtestError("a stream has ended without an event")
        waited = time.perf_counter() - started
        answer.read()
        return 1000 * waited

    def step(self) -> float:
        """Return the milliseconds that each additional token adds to a text that is not streamed."""
        took = {}
        for tokens in (1, 1 + STEPS):
            asked = {"model": self._model, "prompt": "def f(", "max_tokens": tokens, "ignore_eos": True, "seed": 0}
            started = time.perf_counter()
            self._post("/v1/completions", asked).read()
            took[tokens] = 1000 * (time.perf_counter() - started)
        return (took[1 + STEPS] - took[1]) / STEPS

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        if answer.status >= 300:
            raise LoadtestError(f"{path} was answered with {answer.status}: {answer.read(300).decode(errors='replace')}")
        return answer
