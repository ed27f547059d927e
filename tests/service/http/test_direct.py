"""Plain requests, which are answered without ASGI: every answer and refusal is the one that `Edge` gives."""

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.errors import QueueTooLong
from service.http.direct import Direct
from tests.service.fakes import PATIENCE_S, case, fake_app, fake_bundle, serve_in_thread

NOT_PLAIN = {"x-other": "1"}  # a header that sends a request to `Edge`
VARYING = {"date", "x-request-id"}
Serve = Callable[..., tuple[Any, httpx.Client]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each request to a path with plain requests was taken for one, in order."""
    found: list[bool] = []
    begin = Direct.begin

    def counted(self: Direct, *arguments: Any) -> Any:
        answer = begin(self, *arguments)
        found.append(answer is not None)
        return answer

    monkeypatch.setattr(Direct, "begin", counted)
    return found


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def served(**settings: Any) -> tuple[Any, httpx.Client]:
            app = fake_app(fake_bundle(tmp_path / "mini"), **settings)
            url = stack.enter_context(serve_in_thread(app))
            return app, stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S))

        yield served


def said(answer: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    return answer.status_code, {name: value for name, value in answer.headers.items() if name not in VARYING}, answer.content


def test_a_plain_request_is_answered_as_any_other(serve: Serve, taken: list[bool]) -> None:
    _, http = serve(cache_bytes=0)
    bodies: list[Any] = [
        {"input": "the cat"},
        {"input": "the cat", "model": "mini", "encoding_format": "base64"},
        {"input": ["the cat", "dog fish"], "model": "mini"},
        {"input": [5, 6, 7]},
        {"input": "cat " * 900},  # is truncated, and the answer says so
        {"input": ["cat"] * 40},
        {"input": "cat", "dimensions": 2, "user": "me"},
        {"input": ["cat", ""]},
        {"input": [5, 1_000_000]},
        {"input": "cat", "model": "other"},
        {"input": []},
        {"input": "cat", "encoding_format": "hex"},
        {"model": "mini"},
        ["cat"],
    ]
    for body in bodies:
        with case(body):
            answers = [http.post("/v1/embeddings", json=body, headers=headers) for headers in ({}, NOT_PLAIN)]
            assert said(answers[0]) == said(answers[1])
    assert taken == [True, False] * len(bodies)


def test_many_inputs_are_not_plain(serve: Serve, taken: list[bool]) -> None:
    _, http = serve()
    assert http.post("/v1/embeddings", json={"input": ["cat"] * 100}).status_code == 200
    assert taken == [False]


def test_a_plain_answer_is_compressed_as_any_other(serve: Serve, taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.content_encoding.LEAST_BYTES", 4096)  # the vectors of this bundle are short
    _, http = serve()
    for coding, count in (("gzip", 1), ("gzip", 50), ("", 50)):
        for headers in ({}, NOT_PLAIN):
            answer = http.post("/v1/embeddings", json={"input": ["cat"] * count}, headers={**headers, "accept-encoding": coding})
            assert answer.headers.get("content-encoding") == (coding if coding and count > 1 else None)
            assert len(answer.json()["data"]) == count
    assert taken == [True, False] * 3


def test_its_id_comes_back(serve: Serve, taken: list[bool]) -> None:
    _, http = serve()
    for sent in ("a-1", "forged\tid", ""):
        ids = [http.post("/v1/embeddings", json={"input": "cat"}, headers={"x-request-id": sent}).headers["x-request-id"] for _ in range(2)]
        assert (ids == [sent, sent]) == (sent == "a-1")
        assert ids[0] != ids[1] or sent == "a-1"
    assert taken == [True] * 6


def counts(app: Any) -> Counter[str]:
    lines = app.state.catalog.metrics.exposition().decode().splitlines()
    found = (line.rpartition(" ") for line in lines if "_total{" in line or "_count{" in line)
    return Counter({name: int(float(value)) for name, _, value in found})


def test_it_is_counted_like_any_other(serve: Serve, taken: list[bool]) -> None:
    app, http = serve(cache_bytes=0)
    added = []
    for headers in ({}, NOT_PLAIN):
        before = counts(app)
        http.post("/v1/embeddings", json={"input": "the cat"}, headers=headers)
        http.post("/v1/embeddings", json={"input": ""}, headers=headers)
        http.get("/health/live")  # is read after the requests before it were counted
        added.append(counts(app) - before)
    assert taken == [True, True, False, False]
    assert added[0] == added[1]
    assert any('"/v1/embeddings"' in name for name in added[0])
    assert app.state.catalog.active == 0


def test_with_keys_it_needs_one_and_is_charged(serve: Serve, taken: list[bool]) -> None:
    app, http = serve(api_keys=["key-of-mine"])
    refused = http.post("/v1/embeddings", json={"input": "cat"})
    answered = http.post("/v1/embeddings", json={"input": "cat"}, headers={"authorization": "Bearer key-of-mine"})
    assert (refused.status_code, answered.status_code, taken) == (401, 200, [True, True])
    (tenant, _), *_ = app.keys._own.values()
    assert [(used.requests, used.prompt_tokens) for used in tenant.usage.values()] == [(1, answered.json()["usage"]["prompt_tokens"])]


def test_in_overload_it_is_refused_with_retry_after(serve: Serve, taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    app, http = serve()

    def full(*_: Any) -> None:
        raise QueueTooLong("Model is overloaded", retry_after_s=2.0)

    monkeypatch.setattr(app.state.catalog.get("mini").engine, "check", full)
    plain, other = (http.post("/v1/embeddings", json={"input": "cat"}, headers=headers) for headers in ({}, NOT_PLAIN))
    assert (plain.status_code, plain.headers["retry-after"], taken) == (429, "2", [True, False])
    assert said(plain) == said(other)


def test_a_bug_is_a_plain_500(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    app, http = serve()
    monkeypatch.setattr(app.state.catalog.get("mini").texts, "encode", lambda *_, **__: 1 / 0)
    assert http.post("/v1/embeddings", json={"input": "cat"}).status_code == 500
    assert app.state.catalog.active == 0


# Connections ---------------------------------------------------------------------------------------------------------------------------


def request(text: str, *more: str) -> bytes:
    body = json.dumps({"input": text}).encode()
    head = ["POST /v1/embeddings HTTP/1.1", "host: me", f"content-length: {len(body)}", f"x-request-id: {text}", *more]
    return "\r\n".join([*head, "", ""]).encode() + body


def connect(http: httpx.Client) -> socket.socket:
    return socket.create_connection(("127.0.0.1", http.base_url.port or 0), PATIENCE_S)


def ids_of(connection: socket.socket, count: int) -> list[str]:
    """The ids of this many answers, in the order in which they are received."""
    received = b""
    while received.count(b'"truncated":[]}') < count and (chunk := connection.recv(65_536)):
        received += chunk
    return [line.split(": ")[1] for line in received.decode().split("\r\n") if line.startswith("x-request-id")]


def test_pipelined_requests_are_answered_in_order(serve: Serve, taken: list[bool]) -> None:
    app, http = serve()
    session = app.state.catalog.session("mini")
    session.hold()
    with connect(http) as connection:
        connection.sendall(request("cat") + request("dog") + request("fish"))
        session.open()
        assert ids_of(connection, 3) == ["cat", "dog", "fish"]
    assert taken[0]


def test_a_body_that_stops_is_read_within_the_limits_of_uploads(serve: Serve, taken: list[bool]) -> None:
    _, http = serve(body_grace_s=0.2)
    with connect(http) as connection:
        connection.sendall(request("cat")[:-4])
        assert connection.recv(65_536).startswith(b"HTTP/1.1 408")
    assert taken == []
