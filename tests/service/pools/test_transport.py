"""Calls over real sockets between a gateway and a replica in this process."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.errors import NeverFits, QueueTooLong
from service.pools import transport
from service.pools.limits import MESSAGE_BYTES
from service.pools.replicas import ReplicaLost
from service.pools.transport import Address, CallFailed, Connection, Listener, SocketPool
from service.pools.wire import pack, unpacker
from tests.service.fakes import PATIENCE_S

METHODS = ("echo", "wait", "count", "fail", "refuse", "refuse_late", "long")


class Host:
    """Counts what runs, and what was cancelled. `go` lets calls of `wait` return."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.sent = 0

    async def echo(self, *values: Any) -> Any:
        return values

    async def wait(self) -> str:
        self.began.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return "done"

    async def count(self, to: int, size: int = 1) -> AsyncGenerator[Any, None]:
        try:
            for number in range(to):
                self.sent = number
                yield number, b"x" * size
                await asyncio.sleep(0)
        finally:
            self.cancelled.set()

    async def fail(self) -> None:
        raise KeyError("a secret of the replica")

    async def refuse(self) -> None:
        raise QueueTooLong("full", retry_after_s=2.5)

    async def refuse_late(self) -> AsyncGenerator[Any, None]:
        yield 1
        await self.refuse()

    async def long(self) -> bytes:
        return b"x" * (MESSAGE_BYTES + 1)

    async def hidden(self) -> str:
        return "not among the methods"


@asynccontextmanager
async def listening(folder: Path | None) -> AsyncIterator[tuple[Host, Listener, Address]]:
    host = Host()
    listener = Listener(host, METHODS)
    address = await listener.start(folder=folder, host="" if folder else "127.0.0.1")
    try:
        yield host, listener, address
    finally:
        host.go.set()
        await asyncio.wait_for(listener.finish(), PATIENCE_S)


@pytest.fixture(params=["unix", "tcp"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "unix" else None


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PATIENCE_S)


ARRAYS = [np.arange(6).reshape(2, 3).astype(kind) for kind in (np.float32, np.float16, np.int32, np.int64, np.uint8, np.bool_)]


async def test_values_arrive_as_they_were_sent(folder: Path | None) -> None:
    values = ({"a": 1.5, "b": None}, ("x", -1, 2**40, True), b"\x00\xff", float("inf"), np.float32(0.5), np.int64(3))
    async with listening(folder) as (_, _, address):
        connection = await Connection.open(address)
        assert await connection.call("echo", *values) == values
        for sent in (*ARRAYS, np.zeros((0, 4), np.float32), np.array(7, np.float32)):
            (got,) = await connection.call("echo", np.asarray(sent))
            assert (got.dtype, got.shape) == (np.asarray(sent).dtype, np.asarray(sent).shape)
            assert np.array_equal(got, sent)
        assert await asyncio.gather(*(connection.call("echo", number) for number in range(100))) == [(number,) for number in range(100)]
        connection.close()


async def test_a_cancelled_call_is_cancelled_on_the_replica(tmp_path: Path) -> None:
    async with listening(tmp_path) as (host, listener, address):
        connection = await Connection.open(address)
        call = asyncio.create_task(connection.call("wait"))
        await soon(host.began)
        call.cancel()
        await soon(host.cancelled)
        at_once = asyncio.create_task(connection.call("wait"))
        await asyncio.sleep(0)  # the call and its end are sent together
        at_once.cancel()
        assert await connection.call("echo", 1) == (1,)
        assert not any(served.calls for served in listener._connections)
        assert not connection._calls
        connection.close()


async def test_a_closed_stream_is_cancelled_on_the_replica(tmp_path: Path) -> None:
    async with listening(tmp_path) as (host, _, address):
        connection = await Connection.open(address)
        async with aclosing(connection.stream("count", 10**9)) as numbers:
            assert await anext(numbers) == (0, b"x")
        await soon(host.cancelled)
        assert await connection.call("echo", 1) == (1,)
        connection.close()


async def test_a_lost_connection_ends_every_call_and_the_replicas_work(tmp_path: Path) -> None:
    async with listening(tmp_path) as (host, listener, address):
        connection = await Connection.open(address)
        calls = [asyncio.create_task(connection.call("wait")), asyncio.create_task(anext(connection.stream("wait")))]
        await soon(host.began)
        for served in list(listener._connections):
            assert served._transport is not None
            served._transport.abort()
        for call in calls:
            with pytest.raises(ReplicaLost):
                await asyncio.wait_for(call, PATIENCE_S)
        await soon(host.cancelled)
        assert connection.closed
        with pytest.raises(ReplicaLost):
            await connection.call("echo")


@pytest.mark.parametrize("method", ["fail", "hidden", "__init__", "absent"])
async def test_an_unexpected_error_ends_its_call_alone(tmp_path: Path, method: str) -> None:
    async with listening(tmp_path) as (_, _, address):
        connection = await Connection.open(address)
        with pytest.raises(CallFailed):
            await connection.call(method)
        assert await connection.call("echo", 1) == (1,)
        connection.close()


async def test_an_error_of_a_request_is_raised_at_the_gateway(tmp_path: Path) -> None:
    async with listening(tmp_path) as (_, _, address):
        connection = await Connection.open(address)
        with pytest.raises(QueueTooLong, match="full") as refused:
            await connection.call("refuse")
        assert refused.value.retry_after_s == 2.5
        messages = connection.stream("refuse_late")
        assert await anext(messages) == 1
        with pytest.raises(QueueTooLong, match="full"):
            await anext(messages)
        connection.close()


async def test_what_is_too_long_is_refused_on_either_side(tmp_path: Path) -> None:
    async with listening(tmp_path) as (_, _, address):
        connection = await Connection.open(address)
        with pytest.raises(NeverFits, match="send it in parts"):
            await connection.call("echo", b"x" * MESSAGE_BYTES)
        with pytest.raises(NeverFits, match="send it in parts"):
            await connection.call("long")
        assert len((await connection.call("echo", b"x" * (MESSAGE_BYTES - 100)))[0]) == MESSAGE_BYTES - 100
        assert not connection._calls
        connection.close()


async def test_a_reader_that_stops_stops_the_stream(tmp_path: Path) -> None:
    async with listening(tmp_path) as (host, listener, address):
        path, _, secret = address
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(path)
            raw.sendall(secret + pack((0, "count", (10_000, 1 << 16))))
            loop = asyncio.get_running_loop()
            until = loop.time() + PATIENCE_S
            while not any(not served._writable.is_set() for served in listener._connections):
                assert loop.time() < until
                await asyncio.sleep(0.01)
            before = host.sent
            for _ in range(100):
                await asyncio.sleep(0)
            assert host.sent == before < 100
        await soon(host.cancelled)


@pytest.mark.parametrize("sent", [b"x" * 32, b"x" * 31, b"", b"GET / HTTP/1.1\r\nhost: a.example.org\r\n\r\n"])
async def test_nothing_is_called_without_the_secret(folder: Path | None, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_SECRET_S", 0.05)
    async with listening(folder) as (host, _, (place, port, _)):
        reader, writer = await (asyncio.open_connection(place, port) if port else asyncio.open_unix_connection(place))
        writer.write(sent)
        if len(sent) == 32:
            writer.write(pack((0, "wait", ())))
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        assert not host.began.is_set()
        writer.close()


async def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_MOST_CONNECTIONS", 2)
    async with listening(tmp_path) as (_, _, (path, _, _)):
        opened = [await asyncio.open_unix_connection(path) for _ in range(3)]
        assert await asyncio.wait_for(opened[2][0].read(), PATIENCE_S) == b""
        assert not any(reader.at_eof() for reader, _ in opened[:2])
        for _, writer in opened:
            writer.close()


async def test_a_secret_in_two_parts_is_enough_and_bytes_that_are_no_message_end_the_connection(tmp_path: Path) -> None:
    async with listening(tmp_path) as (_, _, (path, _, secret)):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(secret[:7])
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(secret[7:] + pack((5, "echo", (1,))))
        answers = unpacker()
        answers.feed(await asyncio.wait_for(reader.read(100), PATIENCE_S))
        assert list(answers) == [(5, 0, (1,))]
        writer.write(b"\xc1\xc1\xc1")  # never a message
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()


async def test_a_replica_that_finishes_waits_for_its_calls(tmp_path: Path) -> None:
    async with listening(tmp_path) as (host, listener, address):
        connection = await Connection.open(address)
        call = asyncio.create_task(connection.call("wait"))
        await soon(host.began)
        finishing = asyncio.create_task(listener.finish())
        assert await connection.call("echo", 1) == (1,)
        assert not finishing.done()
        host.go.set()
        assert await call == "done"
        await asyncio.wait_for(finishing, PATIENCE_S)
        with pytest.raises(ReplicaLost):
            await Connection.open(address)


async def test_a_pool_opens_one_connection_to_each_replica_and_another_after_a_loss(tmp_path: Path) -> None:
    asked: list[str] = []
    async with listening(tmp_path) as (_, listener, address):

        async def find(replica: str) -> Address:
            asked.append(replica)
            if replica == "gone":
                raise ReplicaLost("left")
            return address

        pool = SocketPool(lambda: ("one",), find)
        first = asyncio.create_task(pool.call("one", "echo", 0))
        await asyncio.sleep(0)
        others = [asyncio.create_task(pool.call("one", "echo", number)) for number in range(1, 5)]
        first.cancel()
        assert await asyncio.gather(*others) == [(number,) for number in range(1, 5)]
        assert [number async for number, _ in pool.stream("one", "count", 3)] == [0, 1, 2]
        assert asked == ["one"]
        for _ in range(2):
            with pytest.raises(ReplicaLost):
                await pool.call("gone", "echo")
        for served in list(listener._connections):
            served.close()
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(pool.call("one", "wait"), PATIENCE_S)
        assert await pool.call("one", "echo", 7) == (7,)
        assert asked == ["one", "gone", "gone", "one"]
        pool.close()


async def test_a_replica_that_does_not_answer_is_lost_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_CONNECT_S", 0.05)

    async def find(replica: str) -> Address:
        await asyncio.sleep(3600)
        raise AssertionError

    pool = SocketPool(lambda: ("one",), find)
    with pytest.raises(ReplicaLost, match="has not accepted a connection"):
        await asyncio.wait_for(pool.call("one", "echo"), PATIENCE_S)
    assert not pool._opening
