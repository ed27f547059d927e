"""The part `states`: the time to the first token after a stored state, a fork of it, and a prompt that is fed again, as one client sees it;
and the times of single calls of the store.

The service reads every state from its store, because the prefix cache and the memory of states used last are off. All times are in
milliseconds. The requests of a measurement follow one another on one kept-alive connection.
"""

import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from typing import Any

from loadtest.common.benchmark import Benchmark, Figures, Plan, Side
from loadtest.common.redis import Redis
from loadtest.common.report import Bar, Row
from loadtest.common.server import Server, Service
from loadtest.errors import LoadtestError

CONTEXTS = (100, 10_000, 100_000)
LONG = 10_000  # tokens of the prompt that is fed in full
REPEATS, LONG_REPEATS, PAGE = 30, 3, 100
FLAGS = ("--set", "prefix_cache_bytes=0", "--set", "hot_state_bytes=0")
SERVICE = "service"


def benchmark(plan: Plan) -> Benchmark:
    """`--set store=redis` measures a new Redis server in place of SQLite, `many` is the number of forks of one state."""
    manifest = plan.manifest(0, "decoder")
    place = str(plan.folder / "states")
    if plan.options["store"] == "redis":
        place = plan.stack.enter_context(Redis(plan.folder)).url
    elif plan.options["store"] != "sqlite":
        raise LoadtestError(f"store={plan.options['store']}: choose sqlite or redis")
    many = int(plan.options["many"])
    turn = iter(range(10**6))

    def measured(work: Callable[[Client], Figures], server: Server) -> Figures:
        with closing(Client(server, manifest.limits.vocab_size, next(turn))) as client:
            return work(client)

    steps = {"contexts": partial(measured, Client.contexts), "calls": partial(measured, partial(Client.calls, many=many))}
    start = partial(Service, plan.bundles, *FLAGS, "--set", f"states={place}", model=manifest.name)
    return Benchmark([Side(SERVICE, steps, start)], rows(many))


class Client:
    def __init__(self, server: Server, vocab_size: int, seed: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", server.port, timeout=600)
        self._model, self._vocab_size, self._seeded = server.model, vocab_size, random.Random(seed)

    def close(self) -> None:
        self._connection.close()

    def contexts(self) -> Figures:
        states = {context: self._state("/v1/states", model=self._model, token_ids=self._prompt(context)) for context in CONTEXTS}
        for _ in range(3):  # warm up, because the first requests are slower
            self._first_token(self._prompt(1))
        found: dict[str, list[float]] = {}
        for _ in range(REPEATS):  # in turns, so that a slow second of the machine slows all contexts
            found.setdefault("one", []).append(self._first_token(self._prompt(1)))
            for context, state in states.items():
                found.setdefault(f"restored {context}", []).append(self._first_token("", state=state))
                fork = self._state(f"/v1/states/{state}/fork")
                found.setdefault(f"forked {context}", []).append(self._first_token("", state=fork))
        found["again"] = [self._first_token(self._prompt(LONG)) for _ in range(LONG_REPEATS)]
        medians = {name: statistics.median(times) for name, times in found.items()}
        for what in ("restored", "forked"):
            times = [medians[f"{what} {context}"] for context in CONTEXTS]
            medians[f"{what}, uneven"] = max(times) / min(times)
        return medians

    def calls(self, many: int) -> Figures:
        """Store, fork, list, read and delete states, one call after the other."""
        fields = {"model": self._model}
        parent = self._state("/v1/states", **fields, token_ids=self._prompt(CONTEXTS[0]))
        forked = [self._call("POST", f"/v1/states/{parent}/fork") for _ in range(many)]
        forks = [_id(answer) for _, answer in forked]
        took = {
            "stored": [self._call("POST", "/v1/states", **fields, token_ids=self._prompt(1)) for _ in range(REPEATS)],
            "forked": forked,
            "listed": [self._call("GET", f"/v1/states?limit={PAGE}") for _ in range(REPEATS)],
            "read": [self._call("GET", f"/v1/states/{fork}") for fork in forks[:REPEATS]],
            "deleted": [self._call("DELETE", f"/v1/states/{fork}") for fork in forks],
        }
        return {name: statistics.median(ms for ms, _ in calls) for name, calls in took.items()}

    def _prompt(self, tokens: int) -> list[int]:
        return [self._seeded.randrange(self._vocab_size) for _ in range(tokens)]

    def _state(self, path: str, **fields: Any) -> str:
        return _id(self._call("POST", path, **fields)[1])

    def _call(self, method: str, path: str, **fields: Any) -> tuple[float, bytes]:
        """Return the milliseconds of a call, and its answer."""
        started = time.perf_counter()
        answer = self._send(method, path, fields if method == "POST" else None).read()
        return 1000 * (time.perf_counter() - started), answer

    def _first_token(self, prompt: str | list[int], **fields: Any) -> float:
        """Return the milliseconds from the request to the first event of the stream."""
        asked = {"model": self._model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True, "stream": True, "seed": 0, **fields}
        started = time.perf_counter()
        answer = self._send("POST", "/v1/completions", asked)
        while not (line := answer.readline()).startswith(b"data:"):
            if not line:
                raise LoadtestError("a stream has ended without an event")
        waited = time.perf_counter() - started
        answer.read()
        return 1000 * waited

    def _send(self, method: str, path: str, body: Any) -> Any:
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        if answer.status >= 300:
            raise LoadtestError(f"{method} {path} was answered with {answer.status}: {answer.read(300).decode(errors='replace')}")
        return answer


def _id(answer: bytes) -> str:
    made = json.loads(answer)
    return str(made["data"][0]["id"] if "data" in made else made["id"])


def rows(many: int) -> list[Row]:
    made = []
    for context in CONTEXTS:
        for what in ("restored", "forked"):
            work = f"a state of {context:,} tokens {what}, then the first token"
            made.append(Row(work, "ms", (SERVICE, f"{what} {context}"), (SERVICE, "one")))
    restored = (SERVICE, f"restored {LONG}")
    return [
        *made,
        *(
            Row(f"slowest context beside the fastest, {what}", "times", (SERVICE, f"{what}, uneven"), bar=Bar(at_most=1.1))
            for what in ("restored", "forked")
        ),
        Row("a prompt of one token, to the first token", "ms", (SERVICE, "one")),
        Row(f"a prompt of {LONG:,} tokens, fed again", "ms", (SERVICE, "again"), restored),
        Row("a state stored", "ms", (SERVICE, "stored")),
        Row(f"one of {many:,} forks made", "ms", (SERVICE, "forked")),
        Row(f"a page of {PAGE} listed", "ms", (SERVICE, "listed")),
        Row("a state read", "ms", (SERVICE, "read")),
        Row(f"one of {many:,} forks deleted", "ms", (SERVICE, "deleted")),
    ]
