"""Server-sent events: framing, heartbeats, patience with slow clients, and that the work behind a stream ends with it."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from service.call import Call
from service.errors import DeadlineExceeded, ServiceError
from service.http.edge import ClientGone
from service.http.sse import DONE, PING, event, stream
from service.settings import Settings
from tests.service.fakes import app_of, client, put_forward, until
from tests.service.generation_fakes import SAID, FakeGenerator, events, generator_app
from tests.service.http.test_edge import Caller

SOON_S = 0.01  # a heartbeat or a stall that a test waits for


class Pieces:
    """A source that gives what it is given."""

    def __init__(self, *pieces: Any) -> None:
        self.pieces: asyncio.Queue[Any] = asyncio.Queue()
        self.done = self.closed = False
        self.silences = 0  # how often nothing came within the time
        for piece in pieces:
            self.pieces.put_nowait(piece)

    async def take(self, timeout_s: float, interval_s: float) -> Sequence[Any]:
        try:
            piece = await asyncio.wait_for(self.pieces.get(), timeout_s)
        except TimeoutError:
            self.silences += 1
            return []
        if isinstance(piece, Exception):
            raise piece
        self.done = piece == "last"
        return [piece]

    def close(self) -> None:
        self.closed = True


class Plain:
    """A script of bare events."""

    def opening(self) -> bytes:
        return event("opening")

    def pieces(self, pieces: Sequence[Any]) -> bytes:
        assert pieces, "a silence has no event"
        return b"".join(event(piece) for piece in pieces if piece != "nothing to say")

    def closing(self) -> bytes:
        return DONE

    def failure(self, error: ServiceError) -> bytes:
        return event({"error": error.message})


class Client:
    """The sending end of a connection, which can stop taking anything."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.taking = asyncio.Event()
        self.taking.set()

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        await self.taking.wait()

    @property
    def chunks(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]


async def play(source: Pieces, **settings: Any) -> Client:
    reader = Client()
    response = await stream(source, Plain(), Call("id", 0.0), Settings(**settings))
    await response({"type": "http"}, asyncio.Queue().get, reader.send)
    return reader


async def test_an_event_is_one_line_of_json_and_an_empty_one() -> None:
    assert event({"a": "é\n\r"}) == 'data: {"a":"é\\n\\r"}\n\n'.encode()
    assert event([1], "response.created") == b"event: response.created\ndata: [1]\n\n"
    assert PING.startswith(b":")
    assert PING.endswith(b"\n")
    assert not PING.endswith(b"\n\n"), "after an id, an empty line would be an event"


async def test_a_stream_opens_plays_and_closes() -> None:
    source = Pieces("a", "nothing to say", "last")
    reader = await play(source)
    headers = dict(reader.messages[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert (headers[b"cache-control"], headers[b"x-accel-buffering"]) == (b"no-cache", b"no")
    assert b"content-length" not in headers
    assert reader.chunks == [event("opening") + event("a"), event("last"), DONE, b""]
    assert [message.get("more_body", False) for message in reader.messages[1:]] == [True, True, True, False]
    assert source.closed


@pytest.mark.parametrize("failure", [DeadlineExceeded("late"), KeyError("a bug")])
async def test_an_error_before_the_first_piece_is_raised(failure: Exception) -> None:
    source = Pieces(failure)
    with pytest.raises(type(failure)):
        await play(source)
    assert source.closed


@pytest.mark.parametrize(
    ("failure", "told"), [(DeadlineExceeded("late"), "late"), (KeyError("a bug"), "internal error; the log has it under this request's id")]
)
async def test_an_error_after_it_is_the_last_event_and_nothing_says_done(failure: Exception, told: str) -> None:
    source = Pieces("a", failure)
    reader = await play(source)
    assert reader.chunks == [event("opening") + event("a"), event({"error": told}), b""]
    assert source.closed


async def test_silence_is_filled_with_comments() -> None:
    source = Pieces("a")
    playing = asyncio.create_task(play(source, stream_heartbeat_s=SOON_S))
    await until(lambda: source.silences > 1)
    source.pieces.put_nowait("last")
    chunks = (await playing).chunks
    assert chunks[1] == PING
    assert [chunk for chunk in chunks if chunk != PING] == [event("opening") + event("a"), event("last"), DONE, b""]


async def test_a_stream_opens_with_the_first_heartbeat_and_an_error_is_an_event_from_then_on() -> None:
    source = Pieces()
    playing = asyncio.create_task(play(source, stream_heartbeat_s=SOON_S))
    await until(lambda: source.silences > 1)
    source.pieces.put_nowait(DeadlineExceeded("late"))
    chunks = (await playing).chunks
    assert chunks[0] == event("opening")
    assert chunks[-2:] == [event({"error": "late"}), b""]


async def test_a_client_that_takes_nothing_counts_as_gone() -> None:
    source, reader = Pieces("a", "b", "last"), Client()
    reader.taking.clear()
    response = await stream(source, Plain(), Call("id", 0.0), Settings(stream_stall_s=SOON_S))
    with pytest.raises(ClientGone):
        await response({"type": "http"}, asyncio.Queue().get, reader.send)
    assert source.closed
    assert len(reader.messages) == 1


async def test_a_slow_client_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write has the patience anew: the whole may take much longer."""
    source, reader = Pieces(*"abcdefgh", "last"), Client()
    forward = put_forward(monkeypatch)

    async def slow(message: Any) -> None:
        await forward(1000)
        await reader.send(message)

    response = await stream(source, Plain(), Call("id", 0.0), Settings(stream_stall_s=1500))
    await response({"type": "http"}, asyncio.Queue().get, slow)
    assert reader.chunks[-1] == b""


# Over the application --------------------------------------------------------------------------------------------------------------------


async def test_a_slow_reader_gets_joined_pieces_and_the_same_text() -> None:
    """While a client takes nothing its deltas are joined: what waits for it is one piece a choice, however much was said."""
    model = FakeGenerator("wordy")
    async with client(generator_app(model)) as http:
        reader = Caller(app_of(http), path="/v1/completions")
        reader.taking.clear()
        reader.body(json.dumps({"prompt": "x", "max_tokens": 100, "stream": True}).encode())
        await until(lambda: reader.sent and model.engine.runs[0]._ended)
        assert len(reader.sent) == 1, "the status: the rest waits"
        reader.taking.set()
        await reader.done()
    *chunks, done = events(b"".join(message["body"] for message in reader.sent[1:]).decode())
    assert (done, len(chunks)) == ("[DONE]", 2)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == SAID


async def test_what_comes_between_the_first_token_and_the_end_leaves_together() -> None:
    model = FakeGenerator("fake")
    async with client(generator_app(model, stream_interval_s=10)) as http:
        answer = await http.post("/v1/completions", json={"model": "fake", "prompt": "a", "max_tokens": 20, "stream": True})
    said = [event["choices"][0]["text"] for event in events(answer.text)[:-1]]
    assert said == [SAID[0], SAID[1:20]]
