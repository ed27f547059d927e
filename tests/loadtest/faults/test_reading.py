"""Reading streams, coming back to them, and telling how two readings differ."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from loadtest.faults import reading
from loadtest.faults.reading import Choice, Reading, compare, difference, read

Answer = Callable[[BaseHTTPRequestHandler, str | None], None]  # writes to the client; the second argument is Last-Event-ID


def made(*texts: str, tokens: int = 3, **parts: Any) -> Reading:
    choices = {index: Choice(text, {"token_logprobs": [-0.5, -1.0]}, "length") for index, text in enumerate(texts)}
    return Reading(choices=choices, completion_tokens=tokens, **parts)


def with_logprob(value: float) -> Reading:
    changed = made("one two")
    changed.choices[0].logprobs["token_logprobs"][1] = value
    return changed


@pytest.mark.parametrize(
    ("got", "verdict", "words"),
    [
        (made("one two", "three"), "same", ""),
        (made("one two", "thee"), "lost", "choice 1, character 2: 'ee' for 'ree'"),
        (made("one two two", "three"), "doubled", "choice 0, character 7: ' two' for ''"),
        (made("one tow", "three"), "different", "choice 0, character 5"),
        (made("one two", "free"), "different", "choice 1, character 0"),
        (made("one two", "three", tokens=4), "different", "4 tokens"),
        (made("one two"), "lost", "choice 1"),
        (made("one two", "three", error="503: no"), "failed", "503: no"),
    ],
)
def test_a_stream_is_judged_by_the_undisturbed_one(got: Reading, verdict: str, words: str) -> None:
    wanted = made("one two", "three")
    assert compare(wanted, got) == verdict
    if words:
        assert words in difference(wanted, got)


def test_equal_texts_with_other_logprobs_or_ends_are_different() -> None:
    wanted, ended = made("one two"), made("one two")
    ended.choices[0].finish_reason = "stop"
    assert compare(wanted, with_logprob(-1.1)) == compare(wanted, ended) == "different"
    assert "token_logprobs[1]: [-1.1] for [-1.0]" in difference(wanted, with_logprob(-1.1))
    assert "finish_reason stop for length" in difference(wanted, ended)


def event(text: str, number: int) -> bytes:
    chunk = {"choices": [{"index": 0, "text": text, "finish_reason": None}]}
    return f"id: run:{number}\ndata: {json.dumps(chunk)}\n\n".encode()


@contextmanager
def serving(*answers: Answer) -> Iterator[tuple[int, list[str | None]]]:
    """A server with one answer for each connection. Yields its port, and the Last-Event-ID of each request."""
    left, asked = list(answers), list[str | None]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.append(self.headers["last-event-id"])
            left.pop(0)(self, asked[-1])

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


def stream(*parts: bytes) -> Answer:
    def answer(handler: BaseHTTPRequestHandler, last: str | None) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"".join(parts))

    return answer


def refused(handler: BaseHTTPRequestHandler, last: str | None) -> None:
    handler.send_response(503)
    handler.end_headers()
    handler.wfile.write(b"later")


HALF_AN_EVENT = event("lost", 2)[:-10]
END = b"data: [DONE]\n\n"


def test_a_client_comes_back_with_its_last_complete_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.time, "sleep", lambda seconds: None)
    with serving(stream(event("a", 1), HALF_AN_EVENT), refused, stream(event("b", 2), END)) as (port, asked):
        got = read(port, {}, resumes=True)
    assert (got.choices[0].text, got.error, got.connections) == ("ab", None, 3)
    assert asked == [None, "run:1", "run:1"]


def test_without_resuming_a_stream_without_its_end_has_failed() -> None:
    with serving(stream(event("a", 1))) as (port, _):
        assert read(port, {}).error == "the stream ended without [DONE]"


def test_a_stream_whose_events_have_no_ids_is_not_begun_again() -> None:
    with serving(stream(event("a", 1).partition(b"\n")[2])) as (port, asked):
        got = read(port, {}, resumes=True)
    assert (got.choices[0].text, len(asked)) == ("a", 1)
    assert got.error
    assert got.error.endswith("its events have no ids to continue it by")


def test_an_error_event_is_final() -> None:
    with serving(stream(event("a", 1), b'data: {"error": {"code": "diverged"}}\n\n')) as (port, asked):
        got = read(port, {}, resumes=True)
    assert (got.error, len(asked)) == ('{"code": "diverged"}', 1)
