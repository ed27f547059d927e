"""Simulates gateways that share one store of leases. Each can be paused; a client whose stream is silent goes to another gateway.

What is checked: once another gateway has taken a run over, the former owner never writes its document again, and sends nothing after its
lease. A client that goes from gateway to gateway gets each token once.
"""

import asyncio
from collections import Counter
from contextlib import contextmanager
from functools import cache
from typing import Any

from service.errors import RunNotFound, ServiceError
from service.states.record import Document, Quota
from service.streams.lease import LEASE_S, Leases, StreamLease
from service.streams.record import RUN_KIND, RunStart, owner_of
from service.telemetry.metrics import Metrics
from tests.simulation.engines import Chances, FailingSqlite, SimulatedStore
from tests.simulation.loop import PROCESS, Deadlock, SimulatedLoop, run
from tests.simulation.world import Result

_QUOTA = Quota(states=1_000, size=2**30)
_TOKEN_S = 0.4  # mean time between two tokens
_SILENT_S = 3.0  # silence after which a client goes to another gateway
_MOST_S = 3_600.0
_NO_RUN = -1  # what a client gets instead of a token if its run cannot be continued
_PAUSED_S = (1.0, 2.5 * LEASE_S)
FAULTS = ("pauses", "commit", "slow store", "wandering")


class WatchedSqlite(FailingSqlite):
    """Records the owners of each run, from the documents that are durable."""

    def __init__(self, loop: SimulatedLoop, chances: Chances) -> None:
        super().__init__(loop, chances)
        self.owners: dict[str, list[tuple[str, float]]] = {}  # run -> its owners, each with the time of its first write
        self.wrong: list[str] = []
        self._new: list[tuple[str, str]] = []

    @contextmanager
    def group(self) -> Any:
        outermost = not self._depth
        if outermost:
            self._new = []
        with super().group():
            yield
        if outermost:
            for id, owner in self._new:
                self._owned(id, owner)

    def write(self, document: Document, expected: int | None, quota: Quota) -> int:
        version = super().write(document, expected, quota)
        if document.kind == RUN_KIND and (owner := owner_of(document.body)):
            self._new.append((document.id, owner))
        return version

    def _owned(self, id: str, owner: str) -> None:
        owners = self.owners.setdefault(id, [])
        if any(owner == earlier for earlier, _ in owners[:-1]):
            self.wrong.append(f"{id}: {owner} writes after {owners[-1][0]} has taken the run over")
        if not owners or owners[-1][0] != owner:
            owners.append((owner, self._simulated.now))


class Gateway:
    """A process with leases and a connection to the store."""

    def __init__(self, name: str, world: "Gateways") -> None:
        self.name = name
        self.loop = world.loop
        self._world = world
        self._store = SimulatedStore(world.states, name, world.loop, world.chances)
        self._leases = Leases(self._store, _QUOTA, _metrics(), clock=world.loop.time)
        self.paused = False

    def pause(self) -> None:
        self.loop.log(f"{self.name} pauses")
        self.paused = self._store.paused = True
        self.loop.stop_process(self.name)

    def resume(self) -> None:
        self.loop.log(f"{self.name} goes on")
        self.paused = self._store.paused = False
        self.loop.continue_process(self.name)
        self._store.wake()

    def serve(self, work: Any) -> "asyncio.Task[Any]":
        """Start a task that belongs to this process."""
        token = PROCESS.set(self.name)
        try:
            return self.loop.create_task(work)
        finally:
            PROCESS.reset(token)

    async def stream(self, start: RunStart, has: int, length: int, arrived: "asyncio.Queue[int | None]") -> None:
        """Send the tokens after the first `has`; token number t has the id t. Begin the run if no gateway has. None ends the stream."""
        try:
            lease = await self._lease(start)
        except ServiceError as error:
            self.loop.log(f"{self.name} cannot send {start.id}: {error!r}")
            arrived.put_nowait(_NO_RUN if isinstance(error, RunNotFound) or not has else None)
            return
        known = min(len(lease.progress.tokens[0]), has)  # the document may have tokens that the client did not receive
        lease.progress.tokens = [list(range(known))]
        for token in range(known, length):
            await asyncio.sleep(self.loop.soon(_TOKEN_S))
            if not await lease.holds():
                self.loop.log(f"{self.name} has lost {start.id}")
                arrived.put_nowait(None)
                return
            lease.note(0, (token,), ended=token == length - 1)
            if token >= has:
                self._world.sent(start.id, lease)
                arrived.put_nowait(token)
        lease.close("completed")
        arrived.put_nowait(None)

    async def _lease(self, start: RunStart) -> StreamLease:
        if start.id in self._world.begun:
            return await self._leases.take_over(start.tenant, start.id, runs_s=_MOST_S)
        self._world.begun.add(start.id)  # also if the write fails, because the client then sends a new run
        lease = self._leases.begin(start, 1, runs_s=_MOST_S)
        await lease.begun(patient=True)
        return lease


class Gateways:
    """One schedule."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.faults = tuple(fault for fault in FAULTS if loop.random.random() < 0.6)
        self.chances = Chances(commit=0.1 if "commit" in self.faults else 0.0, store_s=0.2 if "slow store" in self.faults else 0.002)
        self.states = WatchedSqlite(loop, self.chances)
        self.gateways = [Gateway(f"gateway {at}", self) for at in range(3)]
        self.begun: set[str] = set()
        self.wrong: list[str] = []
        self.stats: Counter[str] = Counter()

    def sent(self, id: str, lease: StreamLease) -> None:
        """Check a token that a gateway sends: after another one has taken the run over, its lease must still be valid."""
        owners = [owner for owner, _ in self.states.owners[id]]
        if lease.owner not in owners[:-1]:
            return
        _, taken = self.states.owners[id][owners.index(lease.owner) + 1]
        self.stats["sent within a lease that another took over"] += 1
        if "commit" not in self.faults and self.loop.now > taken + LEASE_S:
            self.wrong.append(f"{id}: {lease.owner} sends {self.loop.now - taken:.1f} s after another has taken the run over")

    async def live(self) -> None:
        disturbing = asyncio.create_task(self._disturb())
        try:
            async with asyncio.timeout(_MOST_S):
                await asyncio.gather(*(self._client(at) for at in range(self.loop.random.randint(1, 3))))
        except TimeoutError:
            self.wrong.append(f"a client has waited for {_MOST_S:g} s")
        disturbing.cancel()
        for gateway in self.gateways:
            if gateway.paused:
                gateway.resume()
        await asyncio.sleep(4 * LEASE_S)

    async def _client(self, number: int) -> None:
        """Read one run to its end, from any gateway. If no gateway knows the run, send the request again."""
        chance, length, has, attempt = self.loop.random, self.loop.random.randint(5, 120), list[int](), 0
        while len(has) < length:
            arrived: asyncio.Queue[int | None] = asyncio.Queue()
            gateway = chance.choice(self.gateways)
            gateway.serve(gateway.stream(_start(f"run_{number:016x}{attempt:016x}"), len(has), length, arrived))
            self.stats["connections"] += 1
            while len(has) < length:
                try:
                    token = await asyncio.wait_for(arrived.get(), _SILENT_S)
                except TimeoutError:
                    break
                if token is None or token == _NO_RUN:
                    if token is not None:
                        has, attempt = [], attempt + 1
                    await asyncio.sleep(0.5)
                    break
                has.append(token)
                if "wandering" in self.faults and chance.random() < 0.03:
                    break
        if has != list(range(length)):
            self.wrong.append(f"client {number} has {has}")
        self.stats["tokens"] += length

    async def _disturb(self) -> None:
        chance = self.loop.random
        while "pauses" in self.faults:
            await asyncio.sleep(self.loop.soon(10.0))
            awake = [gateway for gateway in self.gateways if not gateway.paused]
            if len(awake) > 1:
                gateway = chance.choice(awake)
                gateway.pause()
                self.stats["pauses"] += 1
                self.loop.call_later(chance.uniform(*_PAUSED_S), lambda gateway=gateway: gateway.paused and gateway.resume())


def simulate_gateways(seed: int) -> Result:
    """Run the schedule of this seed."""
    loop = SimulatedLoop(seed)
    world = Gateways(loop)
    try:
        run(loop, world.live())
    except Deadlock as error:
        world.wrong.append(str(error))
    wrong = [*world.wrong, *world.states.wrong, *(f"an error that nobody saw: {each}" for each in loop.broken)]
    return Result(seed, world.faults, wrong, world.stats, loop.digest, loop.events)


def _start(id: str) -> RunStart:
    return RunStart(
        id=id,
        tenant="t",
        path="/",
        body=b"{}",
        seeds=(0,),
        answer_id="a",
        created=0,
        model="toy",
        fingerprint="fake",
        numerics="ab",
    )


@cache
def _metrics() -> Metrics:
    return Metrics()
