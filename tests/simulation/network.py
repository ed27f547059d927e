"""Simulates generator processes and the pool through which a gateway calls them.

Messages take time. Processes die, or pause as if they got SIGSTOP.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

from service.errors import ServiceError
from service.pools.host import Host
from service.pools.replicas import Key, ReplicaLost
from tests.service.pool_fakes import crossed
from tests.simulation.engines import FINGERPRINT, Chances, FailingSqlite, SimulatedEngine, SimulatedStore, opened
from tests.simulation.loop import SimulatedLoop

MODEL = "toy"
KEY: Key = (MODEL, FINGERPRINT)
_GATHERED_S = 0.005  # time for which deltas are collected into one message
_DETECTED_S = (0.05, 0.3)  # least and most time until a gateway learns that a process is dead
Sent = tuple[Any, ...] | ServiceError | None


class Process:
    """A generator: its engine, its own connection to the store, and the host that serves both to gateways."""

    def __init__(
        self, name: str, loop: SimulatedLoop, states: FailingSqlite, chances: Chances, *, slots: int, hot_bytes: int, cache_bytes: int
    ) -> None:
        self.name = name
        self.loop = loop
        self.store = SimulatedStore(states, name, loop, chances)
        self.engine = opened(name, loop, self.store, chances, slots=slots, hot_bytes=hot_bytes, cache_bytes=cache_bytes)
        self.host = Host(cast(Any, _OneModel(self.engine)))
        self.dead = False
        self._running = asyncio.Event()
        self._running.set()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._channels: dict[Channel, None] = {}

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    def work(self, work: Coroutine[Any, Any, Any], channel: "Channel") -> asyncio.Task[Any]:
        """Run a coroutine of this process whose messages go into this channel."""
        task = self.loop.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks[task] = self._channels[channel] = None
        return task

    def done(self, task: asyncio.Task[Any], channel: "Channel") -> None:
        self._tasks.pop(task, None)
        self._channels.pop(channel, None)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.dead:
            self.loop.broken.append(f"{self.name}: {error!r}")

    async def awake(self) -> None:
        """Wait until the process is not paused. While it is, nothing enters or leaves it."""
        await self._running.wait()

    def kill(self) -> None:
        """End the process at once. Messages and writes that are under way are lost."""
        self.loop.log(f"{self.name} dies")
        self.dead = self.engine.dead = self.store.dead = True
        for task in self._tasks:
            task.cancel()
        for channel in self._channels:
            self.loop.call_later(self.loop.random.uniform(*_DETECTED_S), channel.lose)

    def pause(self) -> None:
        self.loop.log(f"{self.name} pauses")
        self.engine.paused = self.store.paused = True
        self._running.clear()

    def resume(self) -> None:
        self.loop.log(f"{self.name} goes on")
        self.engine.paused = self.store.paused = False
        self._running.set()
        self.engine.wake()
        self.store.wake()


class Channel:
    """Messages on their way from a process to the gateway, in order, each with its own delay."""

    def __init__(self, loop: SimulatedLoop, delay_s: float) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._arrived: asyncio.Queue[Sent] = asyncio.Queue()
        self._latest = loop.now
        self._sent: deque[Sent] = deque()

    def send(self, message: Sent) -> None:
        """None ends the channel, and an error is raised there."""
        self._latest = max(self._latest + 1e-9, self._loop.now + self._loop.soon(self._delay_s))
        self._sent.append(message)
        self._loop.call_at(self._latest, self._arrive)

    def _arrive(self) -> None:
        """Deliver the oldest message: the order is kept, even if a later message's timer fires first."""
        self._arrived.put_nowait(self._sent.popleft())

    def lose(self) -> None:
        self._arrived.put_nowait(ReplicaLost("the process has died"))

    async def receive(self) -> tuple[Any, ...] | None:
        message = await self._arrived.get()
        if isinstance(message, ServiceError):
            raise message
        return message


class SimulatedPool:
    """See `service.pools.replicas.Pool`."""

    def __init__(self, loop: SimulatedLoop, delay_s: float) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._processes: dict[str, Process] = {}
        self._names: tuple[str, ...] = ()
        self.streams = 0  # number of streams opened

    @property
    def living(self) -> list[Process]:
        return [process for process in self._processes.values() if not process.dead]

    def add(self, process: Process) -> None:
        self._processes[process.name] = process
        self._names = (*self._names, process.name)

    def forget(self, process: Process) -> None:
        self._names = tuple(name for name in self._names if name != process.name)

    def replicas(self) -> tuple[str, ...]:
        return self._names

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        process, channel = self._processes[replica], Channel(self._loop, self._delay_s)

        async def answer() -> None:
            await asyncio.sleep(self._loop.soon(self._delay_s))
            await process.awake()
            try:
                told: Sent = (crossed(await getattr(process.host, method)(*crossed(arguments))),)
            except ServiceError as error:
                told = crossed(error)
            await process.awake()
            channel.send(told)

        await self._reach(process)
        task = process.work(answer(), channel)
        try:
            message = await channel.receive()
            assert message is not None
            return message[0]
        finally:
            task.cancel()
            process.done(task, channel)

    async def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        process, channel = self._processes[replica], Channel(self._loop, self._delay_s)
        self.streams += 1

        async def answer() -> None:
            await asyncio.sleep(self._loop.soon(self._delay_s))
            await process.awake()
            messages = getattr(process.host, method)(*crossed(arguments))
            try:
                async for message in messages:
                    await process.awake()
                    channel.send((crossed(message),))
                channel.send(None)
            except ServiceError as error:
                await process.awake()
                channel.send(crossed(error))
            finally:
                await messages.aclose()

        async def leave() -> None:
            """Deliver the gateway's cancellation later; a paused process gets it when it continues."""
            await asyncio.sleep(self._loop.soon(self._delay_s))
            await process.awake()
            task.cancel()
            process.done(task, channel)

        await self._reach(process)
        task = process.work(answer(), channel)
        try:
            while (message := await channel.receive()) is not None:
                yield message[0]
        finally:
            leaving = self._loop.create_task(leave())
            process._tasks[leaving] = None
            leaving.add_done_callback(lambda done: process._tasks.pop(done, None))

    async def _reach(self, process: Process) -> None:
        if process.dead:
            await asyncio.sleep(self._loop.random.uniform(*_DETECTED_S))
            raise ReplicaLost("there is no such process")


class _OneModel:
    """The part of a catalog that a host needs, with one decoder."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.settings = SimpleNamespace(stream_interval_s=_GATHERED_S)
        self._model = SimpleNamespace(
            name=MODEL,
            engine=engine,
            provider=engine.provider,
            manifest=SimpleNamespace(fingerprint=FINGERPRINT),
            described=dict,
        )
        self.models = self.generators = {MODEL: self._model}
        self.encoders: dict[str, Any] = {}

    async def answers(self, model: Any) -> bool:
        """Do what the real catalog does: probe a model whose last call failed."""
        if not model.engine.healthy:
            with suppress(ServiceError):
                await model.engine.probe(float("inf"))
        return bool(model.engine.healthy)

    def check(self, model: Any) -> None: ...
