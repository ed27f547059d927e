"""The clients of `bench-gpu`: they count answers, come again when they are told to, and end with an error's words."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from loadtest.bench.gpu_clients import BODIES, bodies, send
from loadtest.errors import LoadtestError

MADE = bodies(3, "m", texts=2, tokens=5, vocab_size=50)


@contextmanager
def answering(*statuses: int) -> Iterator[tuple[int, list[bytes]]]:
    """A server that gives these answers, the last one again and again. Yields its port and the bodies that it reads."""
    left, seen = list(statuses), list[bytes]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            seen.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"said")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1], seen
        finally:
            server.shutdown()
            thread.join()


def test_requests_have_ids_in_and_base64_out_and_differ() -> None:
    read = [json.loads(body) for body in MADE]
    assert len(set(MADE)) == len(MADE) == BODIES
    assert all(each["encoding_format"] == "base64" and [len(row) for row in each["input"]] == [5, 5] for each in read)
    assert bodies(4, "m", texts=2, tokens=5, vocab_size=50) != MADE


def test_answered_and_refused_requests_are_counted() -> None:
    with answering(429, 200) as (port, seen):
        assert send(MADE, port=port, path="/v1/embeddings", seconds=0.0) == (0, 1)
        answered, refused = send(MADE, port=port, path="/v1/embeddings", seconds=0.05)
    assert (refused, answered) == (0, len(seen) - 1)
    assert seen[1] == MADE[0].encode()


def test_another_answer_is_an_error_with_its_words() -> None:
    with answering(503) as (port, _), pytest.raises(LoadtestError, match="the service answered 503: said"):
        send(MADE, port=port, path="/v1/embeddings", seconds=0.0)
