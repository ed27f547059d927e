"""Clients in open loop: requests come at a fixed rate whatever becomes of those before, and each is followed to its end."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.service.fakes import PATIENCE_S

STREAM_TOKENS = 200
HELD_STREAMS, HELD_TOKENS = 8, 5000  # seconds of work


@dataclass(frozen=True)
class Outcome:
    """What a client saw of one request. `problem` is empty where it was answered whole and right."""

    kind: str
    status: int  # 0: no answer at all
    problem: str


class Load:
    """A context manager: requests to `urls` in turn while it is open. On leaving, what is under way is waited for."""

    def __init__(self, urls: Sequence[str], *, embeddings_per_s: float = 5, streams_per_s: float = 1) -> None:
        self.outcomes: list[Outcome] = []
        self._urls = urls
        self._kinds = {"embedding": (embeddings_per_s, self._embed), "stream": (streams_per_s, self._stream)}
        self._ended = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._play()), daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive(), "requests did not end"

    def more(self, count: int) -> None:
        """Return when so many more requests have been answered or have failed."""
        with self._ended:
            goal = len(self.outcomes) + count
            assert self._ended.wait_for(lambda: len(self.outcomes) >= goal, 2 * PATIENCE_S), "no requests end any more"

    def failures(self, kind: str = "") -> list[Outcome]:
        return [each for each in self.outcomes if each.problem and kind in each.kind]

    # On the thread -----------------------------------------------------------------------------------------------------------------------

    async def _play(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client, asyncio.TaskGroup() as requests:
            for kind, (rate, ask) in self._kinds.items():
                requests.create_task(self._arrive(kind, rate, ask, client, requests))

    async def _arrive(
        self, kind: str, rate: float, ask: Callable[..., Any], client: httpx.AsyncClient, requests: asyncio.TaskGroup
    ) -> None:
        begin, number = time.monotonic(), 0
        while rate and not self._over.is_set():
            requests.create_task(self._follow(kind, ask, client, self._urls[number % len(self._urls)], number))
            number += 1
            await asyncio.sleep(max(begin + number / rate - time.monotonic(), 0))

    async def _follow(self, kind: str, ask: Callable[..., Any], client: httpx.AsyncClient, url: str, number: int) -> None:
        status, problem = 0, ""
        try:
            async with ask(client, url, number) as answer:
                status = answer.status_code
                body = (await answer.aread()).decode()
            problem = body[:300] if status != 200 else missing(kind, body)
        except httpx.HTTPError as error:
            problem = repr(error)
        with self._ended:
            self.outcomes.append(Outcome(kind, status, problem))
            self._ended.notify_all()

    def _embed(self, client: httpx.AsyncClient, url: str, number: int) -> Any:
        return client.stream("POST", f"{url}/v1/embeddings", json={"model": "tiny-encoder", "input": [f"bird {number}", "a cat"]})

    def _stream(self, client: httpx.AsyncClient, url: str, number: int) -> Any:
        asked = {"model": "tiny-decoder", "prompt": f"{number}", "max_tokens": STREAM_TOKENS, "seed": number, "ignore_eos": True}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return client.stream("POST", f"{url}/v1/completions", json=asked)


@contextmanager
def held(urls: Sequence[str]) -> Iterator[None]:
    """At every moment of the block so many streams are under way, one after the other without a pause, and each is whole. Of sessions of
    their own, so that every generator has some."""
    begun, over = [threading.Event() for _ in range(HELD_STREAMS)], threading.Event()

    def follow(number: int) -> str:
        asked = {"model": "tiny-decoder", "prompt": f"{number}", "max_tokens": HELD_TOKENS, "seed": number, "ignore_eos": True}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        url, headers = f"{urls[number % len(urls)]}/v1/completions", {"x-session-id": f"held-{number}"}
        problem = ""
        while not (problem or over.is_set()):
            lines = []
            with httpx.stream("POST", url, json=asked, headers=headers, timeout=PATIENCE_S) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun[number].set()
            problem = missing("stream", "\n".join(lines), HELD_TOKENS)
        return problem

    with ThreadPoolExecutor(HELD_STREAMS) as clients:
        streams = [clients.submit(follow, number) for number in range(HELD_STREAMS)]
        try:
            assert all(each.wait(PATIENCE_S) for each in begun), "a stream did not begin"
            yield
        finally:
            over.set()
        assert [stream.result() for stream in streams] == [""] * HELD_STREAMS


def missing(kind: str, body: str, tokens: int = STREAM_TOKENS) -> str:
    """What a 200 lacks; nothing where it is whole."""
    if kind == "embedding":
        vectors = [each["embedding"] for each in json.loads(body)["data"]]
        right = len(vectors) == 2 and all(abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in vectors)
        return "" if right else "not two vectors of length 1"
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return f"a stream without its end: {events[-1:]}"
    drawn = json.loads(events[-2])["usage"]["completion_tokens"]
    return "" if drawn == tokens else f"{drawn} tokens of {tokens}"
