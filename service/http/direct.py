"""Answers plain requests without ASGI: no scope, one write. Around a small model, these cost more than the model.

A request is plain if its body arrives at once, is short and has only the fields that most clients send, if its head has only usual
headers, and if its answer is not compressed. `Edge` handles all other requests, and those that are invalid, so errors in a request have
one origin. Nothing is counted or reserved for a request that is passed on to it.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from service.call import CONNECTION_HEADER, LARGE_BYTES, NDJSON, NUMBER_BYTES, RECEIVED_HEADER, Call, waited_s
from service.encoding.model import Model
from service.encoding.request import EncodeAnswer, EncodeRequest
from service.errors import ServiceError
from service.http.answers import whole
from service.http.content_encoding import LEAST_BYTES, coding_for
from service.http.gate import CLIENT_GONE, Gate
from service.http.keys import key_in
from service.http.tenants import Tenant
from service.tokenization.texts import Input

if TYPE_CHECKING:
    from service.http.connections import Connection

MOST_BYTES = 16_384  # longer bodies are read by pydantic, within its limits on time
_CONNECTION, _RECEIVED = CONNECTION_HEADER.encode(), RECEIVED_HEADER.encode()
# The headers of a plain request. Those that are not read below change nothing.
_HEADERS = frozenset(
    (
        *(b"host", b"content-length", b"content-type", b"accept", b"accept-encoding", b"accept-language", b"user-agent", b"connection"),
        *(b"authorization", b"x-request-id", _CONNECTION, _RECEIVED),
        # of OpenAI's clients
        *(b"x-stainless-" + name for name in (b"arch", b"async", b"lang", b"os", b"package-version", b"runtime", b"runtime-version")),
        *(b"x-stainless-" + name for name in (b"retry-count", b"read-timeout", b"raw-response", b"timeout", b"helper-method")),
    )
)
_NDJSON = NDJSON.encode()


class Plain(NamedTuple):
    """What a plain body asks for. `content` returns the content of the JSON answer."""

    model: str | None
    inputs: list[Input]
    content: Callable[[Model, EncodeAnswer], Any]


class Direct:
    """The plain requests of one application."""

    most_bytes = MOST_BYTES

    def __init__(self, gate: Gate, readers: Mapping[str, Callable[[bytes], Plain | None]]) -> None:
        """`readers` has, for each path with plain requests, the function that reads a body, or returns None if it is not plain."""
        self._gate = gate
        self.readers = {path.encode(): reader for path, reader in readers.items()}

    def begin(self, connection: "Connection", path: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> "DirectAnswer | None":
        """Begin to answer a request, or return None if `Edge` must handle it."""
        gate, catalog = self._gate, self._gate.catalog
        given = dict(headers)
        if (
            catalog.draining
            or catalog.tracer is not None
            or len(body) > min(MOST_BYTES, catalog.settings.max_body_bytes)
            or not given.keys() <= _HEADERS
            or _NDJSON in given.get(b"accept", b"")
            or (plain := self.readers[path](body)) is None
        ):
            return None
        call = gate.call(_text(given, b"x-request-id"))
        call.content = hash(body)
        call.deadline = call.started + catalog.settings.request_timeout_s
        try:
            model = catalog.get(plain.model, "encoder")
            size_bytes = len(plain.inputs) * model.manifest.width * NUMBER_BYTES
            if size_bytes > LARGE_BYTES or (size_bytes >= LEAST_BYTES and coding_for(_text(given, b"accept-encoding"))):
                return None
            key = key_in({"authorization": _text(given, b"authorization")})
            tenant = gate.identify(call, connection.client, _text(given, _CONNECTION), key)
        except ServiceError:
            return None
        answer = DirectAnswer(gate, connection, path, call)
        connection.cycle = answer  # type: ignore[assignment]  # has the attributes that uvicorn's protocol uses
        catalog.active += 1
        late_s = waited_s({RECEIVED_HEADER: _text(given, _RECEIVED)}) if _RECEIVED in given else 0.0
        answer.work = connection.loop.create_task(answer.run(plain, model, tenant, late_s))
        return answer


class DirectAnswer:
    """The answer to a plain request. For uvicorn's protocol it takes the place of a `RequestResponseCycle`, so it has the attributes that
    the protocol uses: `response_started` .. `keep_alive`, `message_event`.
    """

    __slots__ = (
        *("disconnected", "keep_alive", "response_complete", "response_started"),
        *("_call", "_connection", "_gate", "_path", "work"),
    )

    def __init__(self, gate: Gate, connection: "Connection", path: bytes, call: Call) -> None:
        self.response_started = self.response_complete = self.disconnected = False
        self.keep_alive = True
        self.work: asyncio.Task[None] | None = None
        self._gate, self._connection, self._path, self._call = gate, connection, path.decode(), call

    @property
    def message_event(self) -> "DirectAnswer":
        return self

    def set(self) -> None:
        """Drop the request, because its connection has ended."""
        if not self.response_complete:
            if self.work is not None:
                self.work.cancel()
            self._ended(CLIENT_GONE)

    async def run(self, plain: Plain, model: Model, tenant: Tenant | None, late_s: float) -> None:
        """Compute and write the answer, or write the error, later if there are many refusals. `late_s`: the request's wait to be read."""
        gate, call = self._gate, self._call
        try:
            gate.read_delay.check(call.started, late_s)
            if tenant is not None:
                await tenant.refill()
                tenant.admit()
            done = await model.answer(EncodeRequest(inputs=plain.inputs), call)
            headers = [(b"content-type", b"application/json")]
            headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in call.headers.items()]
            self._write(200, headers, whole(plain.content(model, done)))
        except ServiceError as error:
            if delay_s := gate.delay_s(error):
                await asyncio.sleep(delay_s)
            self._refuse(error)
        except Exception as error:
            self._refuse(gate.unexpected(call, self._path, error))

    def _refuse(self, error: ServiceError) -> None:
        status, body, headers = self._gate.refusal(self._path, error)
        del headers["content-length"]
        self._write(status, [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()], body)

    def _write(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        if self.response_complete:
            return
        connection = self._connection
        if not self.keep_alive:
            headers.append((b"connection", b"close"))
        lines = [STATUS_LINE[status]]
        lines += [b"%b: %b\r\n" % header for header in connection.server_state.default_headers]
        lines.append(b"content-length: %d\r\n" % len(body))
        lines += [b"%b: %b\r\n" % header for header in (*headers, *self._gate.headers(self._call))]
        lines += b"\r\n", body
        connection.transport.write(b"".join(lines))
        self._ended(status)
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()

    def _ended(self, status: int) -> None:
        self.response_started = self.response_complete = True
        self._gate.end(self._call, status, "POST", self._path, self._path)


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str:
    """Return the value of a header without spaces at its end, or "" if there is no such header."""
    return headers.get(name, b"").decode("latin-1").rstrip()
