"""Reads streamed completions, and compares two answers to the same request."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from math import inf
from typing import Any, Literal

Verdict = Literal["same", "lost", "doubled", "different", "failed"]

_TIMEOUT_S = 90.0  # longest wait for the next byte; a service without generators keeps a stream waiting for at most 30 s
_RESUMED_FOR_S = 60.0
_AGAIN_S = 0.5  # interval between attempts to connect


@dataclass
class Choice:
    """The part of one choice that a client has received: its text, its fields of log-probabilities, and its finish reason."""

    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Append the text and log-probabilities of `choice`, a choice in a chunk of the stream."""
        self.text += choice["text"]
        for name, values in (choice.get("logprobs") or {}).items():
            self.logprobs.setdefault(name, []).extend(values or [])
        self.finish_reason = choice["finish_reason"] or self.finish_reason


@dataclass
class Reading:
    """One streamed answer, or the part of it that has arrived. Times are those of `time.time()`, like the times in the service's log."""

    request_id: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    completion_tokens: int | None = None
    error: str | None = None  # why the stream is not complete; None if it is
    times: list[float] = field(default_factory=list)  # arrival times of the chunks with content
    began: float = field(default_factory=time.time)
    connections: int = 1  # number of connections; above 1 if the client had to reconnect
    last_event_id: str = ""
    lost_connection: bool = False  # whether the latest connection ended too early, or was answered with 502 or 503

    def gap_s(self, since: float = -inf, until: float = inf) -> float:
        """Return the longest gap in seconds between two chunks that ends after `since` and begins before `until`; 0 if there is none."""
        gaps = (after - before for before, after in pairwise(self.times) if after > since and before < until)
        return max(gaps, default=0.0)


def read(
    port: int,
    body: dict[str, Any],
    request_id: str = "",
    seen: Callable[[Reading], object] = lambda reading: None,
    *,
    resumes: bool = False,
) -> Reading:
    """Stream a completion to its end and return it. `seen` is called after each chunk. A failure is returned as the reading's `error`.

    With `resumes`, a lost connection, a 502 or a 503 is not yet a failure: the client sends the request again, with the id of the latest
    event that it received. It gives up `_RESUMED_FOR_S` seconds after the latest chunk.
    """
    reading = Reading(request_id)
    while True:
        began = time.time()
        reading.error = _attempt(port, body, reading, seen)
        if reading.error is None or not (resumes and reading.lost_connection):
            return reading
        if reading.times and not reading.last_event_id:  # events have ids only if the service has stored the run in time
            reading.error += ", and its events have no ids to continue it by"
            return reading
        if time.time() - max([*reading.times[-1:], reading.began]) > _RESUMED_FOR_S:
            return reading
        reading.connections += 1
        time.sleep(max(began + _AGAIN_S - time.time(), 0))


def _attempt(port: int, body: dict[str, Any], reading: Reading, seen: Callable[[Reading], object]) -> str | None:
    """Read the stream over one connection. Return None at the end of the stream, or a description of the error that interrupted it."""
    reading.lost_connection = False
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    headers = {
        "content-type": "application/json",
        **({"x-request-id": reading.request_id} if reading.request_id else {}),
        **({"last-event-id": reading.last_event_id} if reading.last_event_id else {}),
    }
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)) as connection:
            connection.request("POST", "/v1/completions", content, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                reading.lost_connection = answer.status in (502, 503)
                return f"{answer.status}: {answer.read()[:300].decode(errors='replace')}"
            for event_id, data in _events(answer):
                if data == "[DONE]":
                    return None
                chunk = json.loads(data)
                if "error" in chunk:
                    return json.dumps(chunk["error"])
                _add(reading, chunk)
                reading.last_event_id = event_id or reading.last_event_id
                seen(reading)
    except (OSError, http.client.HTTPException) as error:
        reading.lost_connection = True
        return repr(error)
    except (ValueError, KeyError) as error:
        return repr(error)
    reading.lost_connection = True
    return "the stream ended without [DONE]"


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str]]:
    """Yield the id and the data of each complete event that has data."""
    event_id = data = ""
    for line in answer:
        name, _, value = line.decode().rstrip("\n").partition(":")
        if name == "id":
            event_id = value.strip()
        elif name == "data":
            data = value.strip()
        elif not name and data:
            yield event_id, data
            data = ""


def _add(reading: Reading, chunk: dict[str, Any]) -> None:
    if chunk["choices"]:
        reading.times.append(time.time())
    for choice in chunk["choices"]:
        reading.choices.setdefault(choice["index"], Choice()).add(choice)
    if chunk.get("usage"):
        reading.completion_tokens = chunk["usage"]["completion_tokens"]


def compare(wanted: Reading, got: Reading) -> Verdict:
    """Return how `got` differs from `wanted`, the undisturbed answer.

    `failed`: the stream has an error. `lost`: a part of a choice's text is missing. `doubled`: a choice's text has an additional part.
    `different`: any other difference in text, log-probabilities, finish reasons or token counts.
    """
    if got.error is not None:
        return "failed"
    if (wanted.choices, wanted.completion_tokens) == (got.choices, got.completion_tokens):
        return "same"
    for index, choice in wanted.choices.items():
        text = got.choices.get(index, Choice()).text
        if text != choice.text:
            shorter = min(len(text), len(choice.text))
            equal = _common(text, choice.text) + _common(text[::-1], choice.text[::-1])
            if equal < shorter or len(text) == len(choice.text):
                return "different"
            return "lost" if len(text) < len(choice.text) else "doubled"
    return "different"


def _common(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def difference(wanted: Reading, got: Reading) -> str:
    """Describe the first difference between two answers, or the error of `got` if it has one."""
    if got.error is not None:
        return got.error
    for index, choice in wanted.choices.items():
        other = got.choices.get(index, Choice())
        if other.text != choice.text:
            at = _common(other.text, choice.text)
            return f"choice {index}, character {at}: {other.text[at : at + 40]!r} for {choice.text[at : at + 40]!r}"
        for name, values in choice.logprobs.items():
            others = other.logprobs.get(name, [])
            if others != values:
                pairs = enumerate(zip(values, others, strict=False))
                at = next((at for at, (value, its) in pairs if value != its), min(len(values), len(others)))
                return f"choice {index}, {name}[{at}]: {others[at : at + 1]} for {values[at : at + 1]} ({len(others)} for {len(values)})"
        if other != choice:
            return f"choice {index}: finish_reason {other.finish_reason} for {choice.finish_reason}"
    return f"{got.completion_tokens} tokens and {len(got.choices)} choices for {wanted.completion_tokens} and {len(wanted.choices)}"
