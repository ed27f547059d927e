"""The state of each replica of a pool, as one gateway sees it, and the choice of the replica for a request.

Texts are sent to the replica with the fewest tokens of this gateway, runs to a replica with few runs or to that of their session.

Each replica gets heartbeats. A replica whose connection failed gets no calls until it responds to a heartbeat. If a replica has
responded to none for `SILENCE_S`, its calls end with ReplicaLost.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping
from typing import Any, Protocol

from service.errors import DeadlineExceeded, NotReady

log = logging.getLogger("attnserve")

HEARTBEAT_S = 1.0
# Longer than any request blocks an event loop, and so short that a client waits less than ten seconds for a second attempt.
SILENCE_S = 5.0
_FRESH_S = 2.5  # a replica that missed two heartbeats gets no new calls if there are others
_RETRY_AFTER_S = 5.0  # about the time that Serve takes to replace a replica

Key = tuple[str, str]  # a model's name and its bundle's fingerprint


class ReplicaLost(NotReady):
    """The replica that had the request has ended or does not respond."""

    elsewhere = True


class Pool(Protocol):
    """Replicas of one kind. `service/deployment/split.py` implements it with Ray."""

    def replicas(self) -> tuple[str, ...]:
        """Names of the available replicas; the same object until they change. A replacement has a new name."""
        ...

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        """Call a method of a replica and return its result. Cancelling the call cancels the work there. Raises ReplicaLost."""
        ...

    def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Call a method of a replica and yield its messages. Closing the generator cancels the work there. Raises ReplicaLost."""
        ...


class Replica:
    """One replica, as seen by this gateway."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Time of the last heartbeat's answer; at first now, because Serve lists a replica after its first health check.
        self.heard = time.monotonic()
        self.lost = False
        self.load = 0  # number of tokens in this gateway's pending calls
        self.runs: Counter[Key] = Counter()  # model -> number of this gateway's runs
        self.others: Mapping[Key, int] = {}  # model -> number of runs of other gateways, from the last heartbeat
        self.models: Mapping[Key, bool] | None = None  # whether each model is healthy, from the last heartbeat
        self.beating: asyncio.Task[None] | None = None
        self._calls: dict[asyncio.Timeout, None] = {}  # in the order in which they began, so that a simulation can be replayed

    def fits(self, key: Key) -> bool:
        """Whether the replica serves this model and the model is healthy. True before the first heartbeat."""
        return self.models is None or self.models.get(key, False)

    def pending(self, key: Key) -> int:
        """Number of running and waiting runs of this model on the replica: this gateway's now, others' as of the last heartbeat."""
        return self.runs[key] + self.others.get(key, 0)

    @contextlib.contextmanager
    def running(self, key: Key, runs: int) -> Iterator[None]:
        """Count `runs` runs of the model on this replica while the context is open."""
        self.runs[key] += runs
        try:
            yield
        finally:
            self.runs[key] -= runs

    def doubt(self, key: Key) -> None:
        """Count the model as unhealthy until the next heartbeat, because one of its runs has failed."""
        self.models = {**(self.models or {}), key: False}

    def hear(self) -> None:
        if self.lost:
            log.info("a replica answers again", extra={"replica": self.name})
        self.heard, self.lost = time.monotonic(), False

    def give_up(self) -> None:
        """Mark the replica as lost, and end all calls to it."""
        self.lost = True
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            if not call.expired():  # an expired call is being cancelled already, and `reschedule` would raise
                call.reschedule(now)

    @contextlib.asynccontextmanager
    async def asked(self, deadline: float = math.inf, tokens: int = 0) -> AsyncIterator[None]:
        """A context for one call of the replica. Raises ReplicaLost as soon as the replica is lost, and DeadlineExceeded at `deadline`
        (time.monotonic())."""
        self.load += tokens
        left_s = deadline - time.monotonic()
        call = asyncio.timeout(None if left_s == math.inf else max(left_s, 0))
        try:
            async with call:
                self._calls[call] = None
                try:
                    yield
                finally:
                    del self._calls[call]
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("the request's deadline passed before its answer was there") from None
            raise ReplicaLost(f"the replica that had the request has been silent for {SILENCE_S:g} s: send it again") from None
        except ReplicaLost:
            self.lost = True  # other calls may continue: a replica that is being stopped completes them
            raise
        finally:
            self.load -= tokens


class Replicas:
    """The replicas of one pool, and the models that they serve."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.described: Mapping[str, dict[str, Any]] = {}
        self.refused: Counter[str] = Counter()  # model -> tokens or runs that no replica accepted since the last heartbeat
        self._names: tuple[str, ...] = ()
        self._replicas: dict[str, Replica] = {}
        self._beating: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Wait until a replica responds, then keep sending heartbeats to all replicas."""
        self._beating = asyncio.create_task(self._beat())
        while not self.described:
            await self.describe()
            await asyncio.sleep(0 if self.described else 0.05)

    async def describe(self) -> None:
        """Ask one of the replicas which models it serves."""
        with contextlib.suppress(NotReady):
            replica = self.least(None)
            async with replica.asked():
                self.described = await self.pool.call(replica.name, "describe")
            await self.ask()

    async def stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        for replica in self._replicas.values():
            if replica.beating is not None:
                replica.beating.cancel()

    # Choice of a replica ---------------------------------------------------------------------------------------------------------------

    def least(self, key: Key | None, without: Collection[Replica] = ()) -> Replica:
        """Return the replica with the fewest tokens of this gateway's calls, if possible outside `without`. Raises NotReady if there
        are none."""
        return min(self._able(key, without), key=lambda replica: (replica.load, random.random()))

    def freest(self, key: Key, without: Collection[Replica] = ()) -> Replica:
        """Choose two random replicas, and return the one with fewer runs. The runs of other gateways are known only from the last
        heartbeat, so if each gateway took the least busy replica, all would take the same one. (Mitzenmacher, The power of two choices in
        randomized load balancing, 2001.)"""
        able = self._able(key, without)
        return min(random.sample(able, min(len(able), 2)), key=lambda replica: replica.pending(key))

    def owner(self, session: str, key: Key, without: Collection[Replica] = ()) -> Replica:
        """Return the replica of a session, the same for every gateway. Rendezvous hashing (Thaler and Ravishankar 1998) makes sure
        that a new or lost replica moves only its own sessions. Raises NotReady if there is none."""
        able = self._able(key, without)
        return max(able, key=lambda replica: hashlib.blake2b(f"{replica.name} {session}".encode(), digest_size=8).digest())

    def others(self, key: Key, tried: Collection[Replica]) -> bool:
        """Whether there is a replica that was not tried."""
        return bool(self._living()) and any(replica not in tried for replica in self._able(key))

    def check(self) -> None:
        """Raise NotReady if no replica responds."""
        if not self._living():
            raise NotReady("no replica answers; they are being replaced: send the request again", retry_after_s=_RETRY_AFTER_S)

    def _able(self, key: Key | None, without: Collection[Replica] = ()) -> list[Replica]:
        """Return the replicas outside `without` that respond and have a healthy copy of the model. Drops a condition that none
        meets."""
        self.check()
        living, now = self._living(), time.monotonic()
        living = [replica for replica in living if replica not in without] or living
        fresh = [replica for replica in living if now - replica.heard < _FRESH_S] or living
        return [replica for replica in fresh if key is None or replica.fits(key)] or fresh

    def _living(self) -> list[Replica]:
        if (names := self.pool.replicas()) is not self._names:
            self._follow(names)
        return [replica for replica in self._replicas.values() if not replica.lost]

    def _follow(self, names: tuple[str, ...]) -> None:
        """Update the set of replicas. A removed replica that was silent is lost; any other removed replica completes its calls."""
        now = time.monotonic()
        for replica in self._replicas.values():
            if replica.name not in names and now - replica.heard > _FRESH_S:
                replica.give_up()
        for name in sorted({*names} ^ {*self._names}):
            log.info("a replica has come" if name in names else "a replica has left", extra={"replica": name})
        self._replicas = {name: self._replicas.get(name) or Replica(name) for name in names}
        self._names = names

    # Heartbeats ------------------------------------------------------------------------------------------------------------------------

    def healthy(self, key: Key) -> bool:
        """Whether at least one replica has reported this model as healthy."""
        return any(replica.models is not None and replica.models.get(key, False) for replica in self._living())

    async def ask(self) -> None:
        """Send a heartbeat to each replica, to learn whether its models are healthy. Does not wait for silent replicas."""
        self._living()
        beats = [self._heartbeat(replica) for replica in self._replicas.values()]
        if beats:
            await asyncio.wait(beats, timeout=HEARTBEAT_S)

    async def _beat(self) -> None:
        expected = time.monotonic()
        while True:
            now = time.monotonic()
            self._living()
            for replica in self._replicas.values():
                # The time in which this process was stopped does not count, because it could not receive answers.
                replica.heard += max(now - expected - HEARTBEAT_S, 0)
                if now - replica.heard > SILENCE_S:
                    if not replica.lost:
                        log.warning("a replica is silent", extra={"replica": replica.name, "seconds": round(now - replica.heard, 1)})
                    replica.give_up()
                self._heartbeat(replica)
            expected = now + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self, replica: Replica) -> "asyncio.Task[None]":
        """Send a heartbeat to a replica, unless one is pending already."""
        if replica.beating is None or replica.beating.done():
            replica.beating = asyncio.create_task(self._ask(replica))
        return replica.beating

    async def _ask(self, replica: Replica) -> None:
        refused, self.refused = self.refused, Counter()
        try:
            async with asyncio.timeout(2 * SILENCE_S):
                said = await self.pool.call(replica.name, "heartbeat", dict(refused))
        except BaseException as error:
            self.refused.update(refused)  # counted again, so that the next heartbeat sends them
            if isinstance(error, ReplicaLost):
                replica.lost = True
            elif not isinstance(error, Exception):
                raise
            # Not for a TimeoutError, which means that the replica is silent; that is logged elsewhere.
            elif not isinstance(error, TimeoutError):
                log.exception("a replica could not be asked")
            return
        replica.models = {(name, fingerprint): healthy for name, fingerprint, healthy, _ in said}
        replica.others = {(name, fingerprint): max(runs - replica.runs[name, fingerprint], 0) for name, fingerprint, _, runs in said}
        replica.hear()
