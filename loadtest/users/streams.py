"""Clients that read text as it is generated: completion and chat. They measure the time to the first token and between tokens."""

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from geventhttpclient.response import HTTPSocketResponse

from loadtest.common import texts
from loadtest.common.texts import MESSAGE
from loadtest.users.client import Answer, Client, refused

DONE = "[DONE]"


class _StreamClient(Client):
    """Reads a stream to its end. A stream without `[DONE]` or with an error event counts as a failure."""

    abstract = True
    path: str

    def ask(self, answer: Answer) -> None:
        started = time.perf_counter()
        asked = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": self.shared.max_tokens}
        response = self.post(self.path, {**asked, "seed": self.draw.getrandbits(31), "ignore_eos": True, **self.prompt()}, answer)
        if answer.status != 200:
            refused(bytes(response.read()), answer)
            return
        moments, done = [], False
        for event in events(response):
            if event == DONE:
                done = True
            elif "error" in event:
                answer.problem = f"the stream broke: {json.dumps(event['error'])[:200]}"
            elif event["choices"]:
                moments += [time.perf_counter()] * bool(text_of(event["choices"][0]))
            else:
                answer.tokens = event["usage"]["completion_tokens"]
        if not done and not answer.problem:
            answer.problem = "the stream ended without [DONE]"
        if moments:
            note(answer, started, moments)

    def prompt(self) -> dict[str, Any]:
        raise NotImplementedError


class Completion(_StreamClient):
    """Sends the beginning of a Python function to be completed, like an editor."""

    kind = "completion"
    path = "/v1/completions"

    def prompt(self) -> dict[str, Any]:
        return {"prompt": texts.code(self.draw)}


class Chat(_StreamClient):
    """Sends a conversation of one to five messages."""

    kind = "chat"
    path = "/v1/chat/completions"

    def prompt(self) -> dict[str, Any]:
        roles = ("user", "assistant") * 2 + ("user",)
        turns = roles[: self.draw.choice((1, 1, 3, 5))]
        return {"messages": [{"role": role, "content": texts.prose(self.draw, MESSAGE.draw(self.draw))} for role in turns]}


def events(response: HTTPSocketResponse) -> Iterator[Any]:
    """Yield the data of each server-sent event: parsed JSON, or the string `[DONE]`. Comments are skipped."""
    while line := response.readline(b"\n"):
        if line.startswith(b"data: "):
            data = bytes(line[6:]).decode().strip()
            yield data if data == DONE else json.loads(data)


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def note(answer: Answer, started: float, moments: list[float]) -> None:
    """Compute a stream's metrics from the arrival times of its text chunks (`moments`), and write them into `answer`. A chunk may contain
    several tokens, so the time between tokens is the mean over the stream (like vLLM's time per output token). The longest gap between two
    chunks is reported too."""
    answer.first_ms = (moments[0] - started) * 1000
    answer.metrics["first token, ms"] = answer.first_ms
    if answer.tokens > 1 and len(moments) > 1:
        reading_s = moments[-1] - moments[0]
        answer.between_ms = reading_s * 1000 / (answer.tokens - 1)
        answer.longest_ms = max(after - before for before, after in pairwise(moments)) * 1000
        answer.metrics["between tokens, ms"] = answer.between_ms
        answer.metrics["longest silence, ms"] = answer.longest_ms
        answer.metrics["tokens/s"] = 1000 / max(answer.between_ms, 1e-6)
