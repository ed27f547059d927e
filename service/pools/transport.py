"""Sends the calls of a gateway to a replica over a socket of their own, and the answers back.

A Ray call costs a task in both processes, a gRPC message and a pickle, together more than the rest of the service. Here a call is one
message of `wire.py` in either direction. Messages of one iteration of the event loop are written together, and read together. A
`ServiceError` of the replica is raised at the gateway.

The replica listens on a Unix socket on one machine, and on its node's address on a cluster. A connection begins with a secret that
the replica has made, which gateways get by a Ray call (`service/deployment/split.py`). Both sides must run the same version.
"""

import asyncio
import hmac
import inspect
import itertools
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from service.errors import AttnserveError, ServiceError
from service.pools.replicas import ReplicaLost
from service.pools.wire import pack, unpacker

log = logging.getLogger("attnserve")

Address = tuple[str, int, bytes]  # (path of a Unix socket, 0, secret) or (host, port, secret)

_RESULT, _ITEM, _END, _FAILED = range(4)  # kinds of answers: the result of a call; a message of a stream, its end; an error
_SECRET_BYTES = 32
_SECRET_S = 5.0  # seconds in which a new connection must send the secret
_MOST_CONNECTIONS = 1_024  # of all gateways, those that have not sent the secret yet included
_CONNECT_S = 10.0


class CallFailed(AttnserveError):
    """A call raised an error that is no `ServiceError`. The replica has logged it."""


class Listener:
    """The replica's side: calls methods of `host` for every gateway that knows the secret. Used on one event loop."""

    def __init__(self, host: Any, methods: Collection[str]) -> None:
        self._host = host
        self._methods = frozenset(methods)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._connections: set[_Served] = set()

    async def start(self, *, folder: Path | None = None, host: str = "") -> Address:
        """Listen on a Unix socket in `folder`, or else on any port of the address `host`. Returns what a gateway needs to connect."""
        loop = asyncio.get_running_loop()
        if folder is not None:
            path = str(folder / f"calls-{os.getpid()}.sock")
            self._server = await loop.create_unix_server(self._accept, path)
            return path, 0, self._secret
        self._server = await loop.create_server(self._accept, host)
        return host, self._server.sockets[0].getsockname()[1], self._secret

    async def finish(self) -> None:
        """Wait until all calls have ended, then close the socket and all connections."""
        while any(connection.calls for connection in self._connections):
            await asyncio.wait([call for connection in self._connections for call in connection.calls.values()])
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> asyncio.Protocol:
        return _Served(self._host, self._methods, self._secret, self._connections)


class _Side(asyncio.Protocol):
    """One side of a connection: reads and writes whole messages."""

    def __init__(self) -> None:
        self._unpacker = unpacker()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._unpacker.feed(data)
            for message in self._unpacker:
                self.received(message)
        except Exception:
            log.exception("a message between a gateway and a replica cannot be read")
            self.close()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writable.set()

    def received(self, message: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def send(self, *message: Any) -> None:
        if self._transport is not None:
            self._transport.write(pack(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Served(_Side):
    """A gateway's connection, in the replica. `calls` are the tasks of its calls, by the gateway's numbers."""

    def __init__(self, host: Any, methods: frozenset[str], secret: bytes, connections: "set[_Served]") -> None:
        super().__init__()
        self._host, self._methods, self._secret, self._connections = host, methods, secret, connections
        self.calls: dict[int, asyncio.Task[None]] = {}
        self._head = b""
        self._admitted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._late = asyncio.get_running_loop().call_later(_SECRET_S, self.close)
        if len(self._connections) >= _MOST_CONNECTIONS:
            self.close()
            return
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        if not self._admitted:
            self._head += data
            if len(self._head) < _SECRET_BYTES:
                return
            secret, data = self._head[:_SECRET_BYTES], self._head[_SECRET_BYTES:]
            if not hmac.compare_digest(secret, self._secret):
                self.close()
                return
            self._admitted, self._head = True, b""
            self._late.cancel()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._late.cancel()
        self._connections.discard(self)
        for call in self.calls.values():
            call.cancel()

    def received(self, message: tuple[Any, ...]) -> None:
        number, *call = message
        if call:
            task = self.calls[number] = asyncio.get_running_loop().create_task(self._answer(number, *call))
            task.add_done_callback(lambda _: self.calls.pop(number))
        elif (running := self.calls.get(number)) is not None:
            running.cancel()

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            if method not in self._methods:
                raise AttributeError(f"no method {method}")
            work = getattr(self._host, method)(*arguments)
            if inspect.isasyncgen(work):
                async with aclosing(work):
                    async for each in work:
                        self.send(number, _ITEM, each)
                        await self._writable.wait()
                self.send(number, _END, None)
            else:
                self.send(number, _RESULT, await work)
        except Exception as error:
            expected = isinstance(error, ServiceError)
            if not expected:
                log.exception("a call of a gateway failed", extra={"method": method})
            self.send(number, _FAILED, error if expected else str(error))


class Connection(_Side):
    """The gateway's connection to a replica. `closed` is True once it has ended; then every call raises ReplicaLost."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self._numbers = itertools.count()
        self._calls: dict[int, Callable[[int, Any], None]] = {}

    @classmethod
    async def open(cls, address: Address) -> "Connection":
        """Connect to a replica. Raises ReplicaLost if it does not accept the connection."""
        loop = asyncio.get_running_loop()
        place, port, secret = address
        try:
            if port:
                _, connection = await loop.create_connection(cls, place, port)
            else:
                _, connection = await loop.create_unix_connection(cls, place)
        except OSError as error:
            raise ReplicaLost(f"the replica does not accept connections: {error}") from None
        assert connection._transport is not None
        connection._transport.write(secret)
        return connection

    def received(self, message: tuple[Any, ...]) -> None:
        number, kind, value = message
        if (take := self._calls.get(number)) is not None:  # else the call was cancelled
            take(kind, value)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.closed = True
        for take in list(self._calls.values()):
            take(_FAILED, _lost())

    async def call(self, method: str, *arguments: Any) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def take(kind: int, value: Any) -> None:
            if not done.done():
                done.set_result((kind, value))

        number = self._begin(take, method, arguments)
        try:
            kind, value = await done
            return _checked(kind, value)
        except asyncio.CancelledError:
            self.send(number)
            raise
        finally:
            del self._calls[number]

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        # Without a bound: its one reader passes each message on at once, and a request's answer is bounded.
        answers: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        number = self._begin(lambda kind, value: answers.put_nowait((kind, value)), method, arguments)
        kind = _ITEM
        try:
            while True:
                kind, value = await answers.get()
                if kind == _END:
                    return
                yield _checked(kind, value)
        finally:
            del self._calls[number]
            if kind == _ITEM:
                self.send(number)

    def _begin(self, take: Callable[[int, Any], None], method: str, arguments: tuple[Any, ...]) -> int:
        if self.closed:
            raise _lost()
        number = next(self._numbers)
        self.send(number, method, arguments)
        self._calls[number] = take
        return number


class SocketPool:
    """Implements `service.pools.replicas.Pool` by one connection to each replica, opened at its first call.

    `replicas` returns the names of the available replicas, and `address` the address of one of them, or raises ReplicaLost.
    """

    def __init__(self, replicas: Callable[[], tuple[str, ...]], address: Callable[[str], Awaitable[Address]]) -> None:
        self.replicas = replicas
        self._address = address
        self._connections: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Task[Connection]] = {}

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        return await (await self._connection(replica)).call(method, *arguments)

    async def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        connection = await self._connection(replica)
        async with aclosing(connection.stream(method, *arguments)) as messages:
            async for message in messages:
                yield message

    def close(self) -> None:
        for opening in self._opening.values():
            opening.cancel()
        for connection in self._connections.values():
            connection.close()

    async def _connection(self, replica: str) -> Connection:
        connection = self._connections.get(replica)
        if connection is not None and not connection.closed:
            return connection
        if replica not in self._opening:
            self._opening[replica] = asyncio.create_task(self._open(replica))
        return await asyncio.shield(self._opening[replica])  # a caller that is cancelled does not take the connection from the others

    async def _open(self, replica: str) -> Connection:
        try:
            async with asyncio.timeout(_CONNECT_S):
                connection = await Connection.open(await self._address(replica))
        except TimeoutError:
            raise ReplicaLost(f"the replica has not accepted a connection for {_CONNECT_S:g} s") from None
        finally:
            del self._opening[replica]
        self._connections = {name: each for name, each in self._connections.items() if not each.closed} | {replica: connection}
        return connection


def _checked(kind: int, value: Any) -> Any:
    """Return the value of an answer, or raise its error."""
    if kind != _FAILED:
        return value
    raise value if isinstance(value, ServiceError) else CallFailed(f"a call to a replica failed: {value}")


def _lost() -> ReplicaLost:
    return ReplicaLost("the replica that worked on the request is gone: send the request again")
