"""Adds to uvicorn's HTTP server the limits on connections that a public port needs.

The head of a request must arrive within `_HEAD_S` seconds, the client must not stop reading for `stream_stall_s` seconds, the number of
connections is bounded, and malformed HTTP is answered in JSON. Uvicorn has none of these limits, and answers malformed HTTP in
plain text. Unlike uvicorn, this server accepts many waiting connections at once, and sends no chunks to clients of HTTP/1.0.
"""

import asyncio
import resource
import socket
import time
from collections import Counter
from typing import Any, ClassVar
from weakref import WeakSet

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service.http.interrupts import WHOLE

_HEAD_S = 10.0
_HEAD_BYTES = 65_536
_HEAD_LINES = 256
_SWEEP_S = 1.0
_HELD_S = 0.1  # seconds in which the body of a plain request must be there
_TCP_CLOSE = 7  # Linux's number of the state of a TCP connection that has ended
_FILES = 512  # open files that the process keeps for other uses than connections
_MOST = 16_384
_ACCEPTED_AT_ONCE = _FILES // 2  # limit on connections accepted before `most_connections` is checked


def most_connections() -> int:
    """Return the limit on connections: the limit on open files of this process, minus the files that the process needs itself."""
    return max(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _FILES, _MOST), 64)


class Connection(HttpToolsProtocol):
    """One connection of a client. `install` sets the limits of all connections."""

    head_s: ClassVar[float] = _HEAD_S
    stall_s: ClassVar[float] = 60.0
    most: ClassVar[int] = 0  # limit on connections; 0: the result of `most_connections()`
    share: ClassVar[float] = 1.0  # share of `most` that one client address may have
    _by_address: ClassVar[Counter[str]] = Counter()
    _swept: ClassVar["WeakSet[Any]"] = WeakSet()  # state objects of the servers for which `_sweep` is scheduled

    _head_since: float | None = None  # time at which the current request's head began; None if the head is complete
    _head_bytes = 0  # bytes of the current request's head so far
    _half_closed = False  # whether the client will send nothing more
    _unread = (0, 0.0)  # (bytes that the client has not read, time since which this number has not decreased)
    _counted = False
    _held: bytearray | None = None  # the body so far of a request that may be plain
    _held_timer: asyncio.TimerHandle | None = None  # passes the request on if its body takes longer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.server_state not in self._swept:
            self._swept.add(self.server_state)
            self.loop.call_later(_SWEEP_S, self._sweep, self.loop, self.server_state)
        super().connection_made(transport)
        self._head_since = time.monotonic()
        address = self.client[0] if self.client else ""
        self._by_address[address] += 1
        self._counted = True
        most = self.most or most_connections()
        if len(self.connections) > most or self._by_address[address] > most * self.share:
            self.refuse(503, f"the service has {len(self.connections)} connections open and accepts no more from this address: try again")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counted:
            self._counted = False
            address = self.client[0] if self.client else ""
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
        self._release()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._held is not None and self._held_timer is None:  # many clients send the body after the head
            self._held_timer = self.loop.call_later(_HELD_S, self._pass_on)
        if self._head_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self.refuse(431, f"the request's head is over {_HEAD_BYTES} bytes: send fewer or shorter headers")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_since = time.monotonic()

    def on_headers_complete(self) -> None:
        self._head_since = None
        self._head_bytes = 0
        if len(self.headers) > _HEAD_LINES:
            raise ValueError  # ends the parsing, so `send_400_response` is called
        if (
            (direct := getattr(self.app, "direct", None)) is not None
            and self.url in direct.routes
            and self.parser.get_method() == b"POST"
            and (self.cycle is None or self.cycle.response_complete)
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.expect_100_continue
            and not self.flow.write_paused
        ):
            self._held = bytearray()
        else:
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0" and not self.parser.should_upgrade():
                _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        if self._held is None:
            super().on_body(body)
        else:
            self._held += body
            if len(self._held) > self.app.direct.most_bytes:
                self._pass_on()

    def on_message_complete(self) -> None:
        self.scope[WHOLE] = True  # type: ignore[literal-required]
        if self._held is not None:
            body = bytes(self._held)
            if self.app.direct.begin(self, self.url, self.headers, body) is not None:
                self._release()
                return
            self._pass_on()
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection open for an answer. The client has ended its side: it will send no other request, or it has
        closed the connection.

        To a closed connection the interim response 100, which clients must accept, is answered with a reset. `_check` finds the reset.
        """
        if self.cycle is None or self.cycle.response_complete or not self.scope.get(WHOLE):
            return False
        self._half_closed = True
        self.cycle.keep_alive = False
        if not self.pipeline and not self.cycle.response_started and self.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _pass_on(self) -> None:
        """Let the application handle the request that is held, if there is one."""
        body = self._release()
        if body is not None and not self.transport.is_closing():
            super().on_headers_complete()
            if body:
                super().on_body(bytes(body))

    def _release(self) -> bytearray | None:
        """Return the body so far of the request that is held, or None, and hold it no longer."""
        held, self._held = self._held, None
        if self._held_timer is not None:
            self._held_timer.cancel()
            self._held_timer = None
        return held

    def shutdown(self) -> None:
        self._pass_on()
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # closed without an error, which cannot be sent in the middle of an answer
        elif len(self.headers or ()) > _HEAD_LINES:
            self.refuse(431, f"the request's head has {len(self.headers)} lines, and the most is {_HEAD_LINES}: send fewer headers")
        else:
            self.refuse(400, "the request is not valid HTTP/1.1: send it with an HTTP client, its target in ASCII")

    def refuse(self, status: int, message: str) -> None:
        """Send an error, and close the connection. The request's dialect is not known yet, so the message is in the two most usual
        fields, `error` and `message`."""
        kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
        error = {"message": message, "type": kind, "param": None, "code": None}
        body = orjson.dumps({"error": error, "message": message})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nretry-after: 1\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.is_closing() or not self.transport.get_write_buffer_size():
            super().timeout_keep_alive_handler()
        else:  # reached while the client is still reading the previous answer
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    @classmethod
    def _sweep(cls, loop: asyncio.AbstractEventLoop, server: Any) -> None:
        now = time.monotonic()
        for each in list(server.connections):
            if isinstance(each, cls):
                each._check(now)
        if server.connections:
            loop.call_later(_SWEEP_S, cls._sweep, loop, server)
        else:
            cls._swept.discard(server)

    def _check(self, now: float) -> None:
        """Close the connection if its client has reset it, or has taken too long to send a request's head or to read an answer."""
        if self._half_closed and _is_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
        if self._head_since is not None and now - self._head_since > self.head_s and not self.transport.is_closing():
            if self.scope is None:  # true until the client has sent a request on this connection
                self.transport.close()
            else:
                self.refuse(408, f"the request's head did not come whole in {self.head_s:g} s: send it faster")
        # Only while writing is paused, or after the end of an answer, is nothing added to the unread bytes. Then their number shows whether
        # the client reads.
        full = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        unread = self.transport.get_write_buffer_size() if full else 0
        last, since = self._unread
        if not unread or unread < last or not last:
            self._unread = unread, now
        elif now - since > self.stall_s:
            self.transport.abort()


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let the end of the connection end an answer of unknown length. Clients of HTTP/1.0 would read the marks of chunks as its text."""
    send, unsized = cycle.send, False

    async def plain(message: Any) -> None:
        nonlocal unsized
        if message["type"] == "http.response.start":
            unsized = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if unsized:
                cycle.chunked_encoding = False
        elif unsized:
            cycle.expected_content_length += len(message.get("body", b""))  # uvicorn compares this with the bytes that it sends
        await send(message)

    cycle.send = plain  # type: ignore[method-assign]


def _is_reset(connection: socket.socket) -> bool:
    """Return whether the other end has reset a connection that is no longer read. The event loop does not notice this."""
    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
    return is_tcp and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE


class Server(uvicorn.Server):
    """A server that accepts up to `_ACCEPTED_AT_ONCE` waiting connections in each iteration of the event loop.

    uvloop accepts one connection per iteration, as libuv does since version 1.45. An iteration takes 0.1 s while hundreds of requests are
    computed, so the last of 256 new connections would wait for half a minute.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._listeners: list[socket.socket] = []
        self._accepted: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        # Duplicates, because an event loop watches a descriptor only once, and uvicorn's server already watches the originals.
        self._listeners = [each.dup() for each in sockets or ()]
        for listener in self._listeners:
            listener.setblocking(False)
            loop.add_reader(listener, self._accept, listener, loop)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        await super().shutdown(sockets)

    def _accept(self, listener: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = listener.accept()
            except OSError:  # BlockingIOError: no connection is waiting. After other errors the event loop calls again
                return
            accepted.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(self._connection, accepted))
            self._accepted.add(task)
            task.add_done_callback(self._accepted.discard)

    def _connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]


def install(*, stall_s: float, behind_proxy: bool) -> None:
    """Replace uvicorn's classes by the classes of this module, before Ray or this process starts a server.

    `stall_s`: seconds for which a client may stop reading. `behind_proxy`: whether all connections come from one proxy. Then one address
    may have all connections, otherwise half of them.
    """
    import uvicorn.protocols.http.auto as auto

    Connection.stall_s = stall_s
    Connection.share = 1.0 if behind_proxy else 0.5
    auto.AutoHTTPProtocol = Connection
    uvicorn.Server = Server  # type: ignore[misc]
