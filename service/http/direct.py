"""Answers plain requests without ASGI: no scope, one write. Around a small model, these cost more than the model.

A request is plain if its body arrives at once, is short and has few inputs, and if its head has only usual headers. `Edge` handles all
other requests. Both call the same function of the route. Nothing is counted or reserved for a request that is passed on to `Edge`.
"""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from service.call import ARROW, CONNECTION_HEADER, NDJSON, RECEIVED_HEADER, Call, waited_s
from service.errors import ServiceError
from service.http.content_encoding import CompressingSend
from service.http.gate import CLIENT_GONE, Gate
from service.http.keys import key_in
from service.http.routing import JsonRoute

if TYPE_CHECKING:
    from service.http.connections import Connection

MOST_BYTES = 16_384
_MOST_COMMAS = 64  # in a body, so that it has few inputs and its whole answer can be written at once
_OUTPUTS = b'"outputs"'  # may ask for a vector of each token, which is sent in pieces
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
_OTHER_FORMATS = (NDJSON.encode(), ARROW.encode())


class Direct:
    """The plain requests of one application."""

    most_bytes = MOST_BYTES

    def __init__(self, gate: Gate, routes: Mapping[str, JsonRoute]) -> None:
        """`routes`: the routes that take plain requests, by path."""
        self._gate = gate
        self.routes = {path.encode(): route for path, route in routes.items()}

    def begin(self, connection: "Connection", path: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> "DirectAnswer | None":
        """Begin to answer a request, or return None if `Edge` must handle it."""
        catalog, given = self._gate.catalog, dict(headers)
        if (
            catalog.draining
            or catalog.tracer is not None
            or len(body) > min(MOST_BYTES, catalog.settings.max_body_bytes)
            or body.count(b",") > _MOST_COMMAS
            or body.startswith(BOM_UTF8)
            or _OUTPUTS in body
            or not given.keys() <= _HEADERS
            or any(each in given.get(b"accept", b"") for each in _OTHER_FORMATS)
        ):
            return None
        call = self._gate.call(_text(given, b"x-request-id"))
        call.content = hash(body)
        call.deadline = call.started + catalog.settings.request_timeout_s
        answer = DirectAnswer(self._gate, connection, path, call)
        connection.cycle = answer  # type: ignore[assignment]  # has the attributes that uvicorn's protocol uses
        catalog.active += 1
        answer.work = connection.loop.create_task(answer.run(self.routes[path], given, body))
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

    async def run(self, route: JsonRoute, given: Mapping[bytes, bytes], body: bytes) -> None:
        """Compute and write the answer, or write the error, later if there are many refusals."""
        gate, call, messages = self._gate, self._call, list[Any]()

        async def collect(message: Any) -> None:
            messages.append(message)

        try:
            key = key_in({"authorization": _text(given, b"authorization")})
            tenant = gate.identify(call, self._connection.client, _text(given, _CONNECTION), key)
            if tenant is not None:
                await tenant.refill()
                tenant.admit()
            gate.read_delay.check(call.started, waited_s({RECEIVED_HEADER: _text(given, _RECEIVED)}) if _RECEIVED in given else 0.0)
            assert route.answer is not None
            response = await route.answer(body, call, gate.catalog)
            await response({"type": "http"}, asyncio.Future, CompressingSend(collect, _text(given, b"accept-encoding")))
            start, *parts = messages
            self._write(start["status"], start["headers"], b"".join(part.get("body", b"") for part in parts))
        except ServiceError as error:
            if delay_s := gate.delay_s(error):
                await asyncio.sleep(delay_s)
            self._refuse(error)
        except Exception as error:
            self._refuse(gate.unexpected(call, self._path, error))

    def _refuse(self, error: ServiceError) -> None:
        status, body, headers = self._gate.refusal(self._path, error)
        self._write(status, [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()], body)

    def _write(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        if self.response_complete:
            return
        connection = self._connection
        if not self.keep_alive:
            headers = [*headers, (b"connection", b"close")]
        lines = [STATUS_LINE[status]]
        lines += [b"%b: %b\r\n" % header for header in connection.server_state.default_headers]
        lines.append(b"content-length: %d\r\n" % len(body))
        lines += [b"%b: %b\r\n" % header for header in (*headers, *self._gate.headers(self._call)) if header[0] != b"content-length"]
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
