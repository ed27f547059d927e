"""One schedule: a gateway, two generators, a store, clients, and faults, all from one seed."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from service.errors import (
    NameMoved,
    NotReady,
    QuotaExceeded,
    RuntimeFailed,
    ServiceError,
    StateGone,
    StateNotFound,
    StoreFailed,
)
from service.generation.model import Generator
from service.pools.generators import PoolGenerator
from service.pools.replicas import Replicas
from service.states.record import Quota
from tests.simulation.clients import Client
from tests.simulation.engines import Chances, FailingSqlite, SimulatedStore
from tests.simulation.history import History, wrong_name, wrong_states
from tests.simulation.loop import Deadlock, SimulatedLoop, run
from tests.simulation.network import FINGERPRINT, MODEL, Process, SimulatedPool

FAULTS = ("deaths", "pauses", "runtime", "commit", "restarts", "slow store", "slow network", "leaving", "slow readers", "quota", "sweeps")
_MOST_S = 900.0  # virtual seconds until all clients must be done
_QUIET_S = 30.0  # virtual seconds after which no slot may be held
_REPLACED_S = (2.0, 8.0)  # least and most time until a dead generator is replaced
_UNTOLD = 0.1  # chance that a generator dies or pauses right after a write to the store is durable
_PAUSED_S = (0.2, 14.0)  # least and most length of a pause; a gateway gives a generator up after 5 s of silence
_AMPLE, _SMALL = Quota(states=10_000, size=2**30), Quota(states=4, size=2**30)


@dataclass
class Result:
    """The result of one schedule. `wrong` is empty if the service behaved correctly."""

    seed: int
    faults: tuple[str, ...]
    wrong: list[str]
    stats: Counter[str]
    digest: str
    events: list[tuple[float, str]] = field(repr=False, default_factory=list)


def simulate(seed: int) -> Result:
    """Run the schedule of this seed."""
    loop = SimulatedLoop(seed)
    world = World(loop)
    digest = ""

    async def main() -> None:
        nonlocal digest
        try:
            await world.live()
        finally:
            digest = loop.digest

    try:
        run(loop, main())
    except Deadlock as error:
        world.violated(str(error))
    wrong = [*world.wrong, *(f"an error that nobody saw: {each}" for each in loop.broken)]
    return Result(seed, world.faults, wrong, world.stats, digest, loop.events)


class World:
    """The processes, clients and faults of one schedule."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.wrong: list[str] = []
        self.stats: Counter[str] = Counter()
        self.history = History()
        self.prompts: list[tuple[int, ...]] = []  # prompts that were sent
        chance = loop.random
        self.faults = tuple(fault for fault in FAULTS if chance.random() < 0.35)
        self.leaves, self.slow = "leaving" in self.faults, "slow readers" in self.faults
        self.quota = _SMALL if "quota" in self.faults else _AMPLE
        self.named = "quota" not in self.faults and chance.random() < 0.5  # off with small quotas, because evicted states lose their names
        self._chances = Chances(
            runtime=0.02 if "runtime" in self.faults else 0.0,
            commit=0.2 if "commit" in self.faults else 0.0,
            store_s=0.2 if "slow store" in self.faults else 0.002,
        )
        self._slots = chance.choice((1, 2, 3))
        self._hot_bytes = chance.choice((0, 3_000, 2**20))
        self._cache_bytes = chance.choice((0, 6_000, 2**20))
        self._delay_s = 0.05 if "slow network" in self.faults else 0.001
        self._processes = 0
        self._disturbed: set[str] = set()  # the faults that have happened

    async def live(self) -> None:
        self._states = FailingSqlite(self.loop, self._chances)
        self.store = SimulatedStore(self._states, "gateway", self.loop, self._chances)
        self._pool = SimulatedPool(self.loop, self._delay_s)
        for _ in range(2):
            self._begin()
        replicas = Replicas(self._pool)
        await replicas.connect()
        self.model = cast(Generator, SimpleNamespace(name=MODEL, engine=PoolGenerator(replicas, MODEL, FINGERPRINT)))
        clients = [Client(self, f"client {at}", f"tenant {at % 2}") for at in range(self.loop.random.randint(1, 4))]
        disturbing = asyncio.create_task(self._disturb())
        try:
            async with asyncio.timeout(_MOST_S):
                await asyncio.gather(*(client.live() for client in clients))
        except TimeoutError:
            self.violated(f"a client has waited for {_MOST_S:g} s")
        except Exception as error:
            self.violated(f"a client got {error!r}")
        disturbing.cancel()
        await self._quiet()
        await replicas.stop()
        self.stats["streams"] += self._pool.streams
        self._check()

    def violated(self, what: str) -> None:
        self.loop.log(what)
        self.wrong.append(what)

    def saw(self, client: str, error: ServiceError) -> None:
        """Check an error that a client got: a fault of the schedule must explain it."""
        self.loop.log(f"{client} got {error!r}")
        self.stats[type(error).__name__] += 1
        explained: dict[type[ServiceError], bool] = {
            NotReady: bool(self._disturbed & {"deaths", "pauses"}),
            RuntimeFailed: "runtime" in self.faults,
            StoreFailed: bool({"commit", "restarts"} & set(self.faults)),
            StateNotFound: any(kept.may_be_gone for kept in self.history.kept.values()),
            StateGone: "quota" in self.faults,
            QuotaExceeded: "quota" in self.faults,
            NameMoved: self.named,
        }
        if not any(isinstance(error, kind) and may for kind, may in explained.items()):
            self.violated(f"{client} got an error that no fault explains: {error!r}")

    # Faults ---------------------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._processes += 1
        name = f"generator {self._processes}"
        sizes = {"slots": self._slots, "hot_bytes": self._hot_bytes, "cache_bytes": self._cache_bytes}
        process = Process(name, self.loop, self._states, self._chances, **sizes)
        process.store.written = lambda: self._written(process)
        self._pool.add(process)

    async def _disturb(self) -> None:
        """Cause faults at random times until the clients are done."""
        chance = self.loop.random
        may = [fault for fault in self.faults if fault in ("deaths", "pauses", "restarts", "sweeps")]
        while may:
            await asyncio.sleep(self.loop.soon(chance.choice((0.03, 0.03, 0.1, 1.0))))
            fault = chance.choice(may)
            self._disturbed.add(fault)
            self.stats[fault] += 1
            awake = [process for process in self._pool.living if not process.paused]
            if fault == "deaths" and self._pool.living:
                asyncio.create_task(self._replace(chance.choice(self._pool.living)))  # noqa: RUF006  # the loop ends it
            elif fault == "pauses" and awake:
                asyncio.create_task(self._pause(chance.choice(awake)))  # noqa: RUF006
            elif fault == "restarts":
                chance.choice([self.store, *(process.store for process in awake)]).restart()
            elif fault == "sweeps":
                self.store.submit(lambda engine: engine.sweep())
            await asyncio.sleep(chance.choice((0.0, 0.5, 3.0)))

    def _written(self, process: Process) -> None:
        """Kill or pause the process, at random, at the worst moment: its write is durable, and no caller has the answer."""
        may = [fault for fault in ("deaths", "pauses") if fault in self.faults]
        if may and not process.dead and not process.paused and self.loop.random.random() < _UNTOLD:
            fault = self.loop.random.choice(may)
            self._disturbed.add(fault)
            self.stats[f"{fault} after a write"] += 1
            asyncio.create_task(self._replace(process) if fault == "deaths" else self._pause(process))  # noqa: RUF006

    async def _replace(self, process: Process) -> None:
        process.kill()
        chance = self.loop.random
        await asyncio.sleep(chance.uniform(0.1, 1.0))
        self._pool.forget(process)
        await asyncio.sleep(chance.uniform(*_REPLACED_S))
        self._begin()

    async def _pause(self, process: Process) -> None:
        process.pause()
        await asyncio.sleep(self.loop.random.uniform(*_PAUSED_S))
        if not process.dead:
            process.resume()

    # The end --------------------------------------------------------------------------------------------------------------------------

    async def _quiet(self) -> None:
        """Resume all paused processes and wait until no work is left."""
        self._chances.runtime = self._chances.commit = 0.0
        for process in self._pool.living:
            if process.paused:
                process.resume()
        await asyncio.sleep(_QUIET_S)

    def _check(self) -> None:
        for process in self._pool.living:
            for leak in process.engine.leaks():
                self.violated(leak)
        forgotten = "sweeps" in self._disturbed
        for wrong in wrong_states(self.history, self._states, evicts="quota" in self.faults, lineages=not forgotten):
            self.violated(wrong)
        for name, operations in self.history.names.items():
            for wrong in wrong_name(operations):
                self.violated(f"name {name}: {wrong}")


def explain(result: Result, *, most: int = 60) -> str:
    """Return the last events of a failed schedule, as text."""
    lines: list[Any] = [f"{at:10.4f}  {event}" for at, event in result.events[-most:]]
    return "\n".join([f"seed {result.seed}, faults {result.faults}", *lines, *result.wrong])
