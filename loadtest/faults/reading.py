"""Reads streamed completions, and compares two readings of one request."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, Literal

Verdict = Literal["same", "lost", "doubled", "different", "failed"]

_TIMEOUT_S = 90.0  # longest wait for the next byte; a service without generators keeps a stream waiting for at most 30 s
_RESUMED_FOR_S = 60.0
_AGAIN_S = 0.5  # interval between attempts to connect


@dataclass
class Choice:
    """What a client has of one choice: text, the fields of its log-probabilities, and the reason of its end."""

    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Add the `choice` of a chunk."""
        self.text += choice["text"]
        for name, values in (choice.get("logprobs") or {}).items():
            self.logprobs.setdefault(name, []).extend(values or [])
        self.finish_reason = choice["finish_reason"] or self.finish_reason


@dataclass
class Reading:
    """One streamed answer. Times are of `time.time()`, as in the service's log."""

    request_id: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    completion_tokens: int | None = None
    error: str | None = None  # why the stream did not come to its end
    times: list[float] = field(default_factory=list)  # of the chunks with content
    began: float = field(default_factory=time.time)
    connections: int = 1  # more than one: the client came back
    last_event_id: str = ""
    lost_connection: bool = False  # whether the last connection ended too early, or was refused with 503

    @property
    def longest_gap_s(self) -> float:
        return max((after - before for before, after in pairwise(self.times)), default=0.0)

    def gap(self, at: float) -> tuple[float, float] | None:
        """Return the times of the last chunk before `at` and of the first one after it, or None if one of them is missing."""
        before, after = [each for each in self.times if each <= at], [each for each in self.times if each > at]
        return (before[-1], after[0]) if before and after else None


def read(
    port: int,
    body: dict[str, Any],
    request_id: str = "",
    seen: Callable[[Reading], object] = lambda reading: None,
    *,
    resumes: bool = False,
) -> Reading:
    """Stream a completion to its end. `seen` is called after each chunk. A failure becomes the reading's `error`.

    With `resumes`, a lost connection and a 503 are no failure: the client sends the request again with the id of its last event, for up to
    `_RESUMED_FOR_S` after the last chunk.
    """
    reading = Reading(request_id)
    while True:
        began = time.time()
        reading.error = _attempt(port, body, reading, seen)
        if reading.error is None or not (resumes and reading.lost_connection):
            return reading
        if reading.times and not reading.last_event_id:  # the service could not store the run in time, and gave its events no ids
            reading.error += ", and its events have no ids to continue it by"
            return reading
        if time.time() - max([*reading.times[-1:], reading.began]) > _RESUMED_FOR_S:
            return reading
        reading.connections += 1
        time.sleep(max(began + _AGAIN_S - time.time(), 0))


def _attempt(port: int, body: dict[str, Any], reading: Reading, seen: Callable[[Reading], object]) -> str | None:
    """Read until the end of the stream, or until an error, which is returned."""
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
    """Judge `got` by the undisturbed reading. `lost` and `doubled`: a choice's text lacks a part, or has one more; `different`: any
    other difference of text, log-probabilities, finish reasons or token counts."""
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
    """Return the length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def difference(wanted: Reading, got: Reading) -> str:
    """Describe the first difference of two readings, or the error of `got`."""
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
