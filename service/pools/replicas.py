"""What a gateway knows of each replica of a pool, and which of them it asks.

Texts go to the replica with the fewest tokens of this gateway, runs to one with few runs, unless they belong to a session.

Each replica gets heartbeats of its own. A replica whose connection broke gets no calls until it answers a heartbeat. If it has answered
none for `SILENCE_S`, its calls end with ReplicaLost.
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
# Longer than any request holds an event loop; with a second attempt it is well under ten seconds.
SILENCE_S = 5.0
_FRESH_S = 2.5  # a replica that has missed two heartbeats gets no new calls while there are others
_RETRY_AFTER_S = 5.0  # about what Serve takes to replace a replica

Key = tuple[str, str]  # a model's name and its bundle's fingerprint


class ReplicaLost(NotReady):
    """The replica that had the request is gone or silent."""

    elsewhere = True


class Pool(Protocol):
    """Replicas of one kind. `service/deployment/split.py` has Ray behind it."""

    def replicas(self) -> tuple[str, ...]:
        """Names of the available replicas; the same object until they change. A replacement has a new name."""
        ...

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        """Its answer. Cancelling the caller ends the work there. Raises ReplicaLost."""
        ...

    def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Its messages. Closing ends the work there. Raises ReplicaLost."""
        ...


class Replica:
    """One replica, as this gateway knows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard = time.monotonic()  # Serve names a replica once it has passed its first check
        self.lost = False
        self.load = 0  # tokens of this gateway's calls
        self.runs: Counter[Key] = Counter()  # of this gateway
        self.others: Mapping[Key, int] = {}  # runs of other gateways, by its last heartbeat
        self.models: Mapping[Key, bool] | None = None  # by its last heartbeat, whether each is healthy
        self.beating: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Timeout] = set()

    def fits(self, key: Key) -> bool:
        """Whether it serves this model and is healthy; assumed until its first heartbeat."""
        return self.models is None or self.models.get(key, False)

    def pending(self, key: Key) -> int:
        """Runs of this model that it has, or that wait there: those of this gateway now, those of others a heartbeat ago."""
        return self.runs[key] + self.others.get(key, 0)

    @contextlib.contextmanager
    def running(self, key: Key, runs: int) -> Iterator[None]:
        """Around what it does for so many runs."""
        self.runs[key] += runs
        try:
            yield
        finally:
            self.runs[key] -= runs

    def doubt(self, key: Key) -> None:
        """A run of the model has failed: it counts as unhealthy until a heartbeat says otherwise."""
        self.models = {**(self.models or {}), key: False}

    def hear(self) -> None:
        if self.lost:
            log.info("a replica answers again", extra={"replica": self.name})
        self.heard, self.lost = time.monotonic(), False

    def give_up(self) -> None:
        """End all calls to it."""
        self.lost = True
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            if not call.expired():  # else its task is about to be cancelled already, and `reschedule` would raise
                call.reschedule(now)

    @contextlib.asynccontextmanager
    async def asked(self, deadline: float = math.inf, tokens: int = 0) -> AsyncIterator[None]:
        """Around a call of it. Raises ReplicaLost as soon as it is lost, DeadlineExceeded at `deadline` (time.monotonic())."""
        self.load += tokens
        left_s = deadline - time.monotonic()
        call = asyncio.timeout(None if left_s == math.inf else max(left_s, 0))
        try:
            async with call:
                self._calls.add(call)
                try:
                    yield
                finally:
                    self._calls.discard(call)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("the request's deadline passed before its answer was there") from None
            raise ReplicaLost(f"the replica that had the request has been silent for {SILENCE_S:g} s: send it again") from None
        except ReplicaLost:
            self.lost = True  # other calls may go on: one that is being stopped finishes what it has
            raise
        finally:
            self.load -= tokens


class Replicas:
    """The replicas of one pool, and what they serve."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.described: Mapping[str, dict[str, Any]] = {}
        self.refused: Counter[str] = Counter()  # by model, tokens or runs that no replica took, until one is told
        self._names: tuple[str, ...] = ()
        self._replicas: dict[str, Replica] = {}
        self._beating: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Wait until a replica answers, then keep listening to all of them."""
        self._beating = asyncio.create_task(self._beat())
        while not self.described:
            await self.describe()
            await asyncio.sleep(0 if self.described else 0.05)

    async def describe(self) -> None:
        """Learn from one of the replicas what it serves."""
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

    # Which replica is asked ------------------------------------------------------------------------------------------------------------

    def least(self, key: Key | None, without: Collection[Replica] = ()) -> Replica:
        """The one with the fewest tokens of this gateway's calls, not of `without` if there are others. NotReady if there is none."""
        return min(self._able(key, without), key=lambda replica: (replica.load, random.random()))

    def freest(self, key: Key, without: Collection[Replica] = ()) -> Replica:
        """Of two random replicas, the one with fewer runs. The numbers of other gateways' runs are a second old, so all gateways would
        choose the same replica if each took the least busy. (Mitzenmacher, The power of two choices in randomized load balancing, 2001.)"""
        able = self._able(key, without)
        return min(random.sample(able, min(len(able), 2)), key=lambda replica: replica.pending(key))

    def owner(self, session: str, key: Key, without: Collection[Replica] = ()) -> Replica:
        """The replica of a session, the same for every gateway: by rendezvous hashing (Thaler and Ravishankar 1998), so that a replica that
        comes or goes moves only its own sessions. Raises NotReady if there is none."""
        able = self._able(key, without)
        return max(able, key=lambda replica: hashlib.blake2b(f"{replica.name} {session}".encode(), digest_size=8).digest())

    def others(self, key: Key, tried: Collection[Replica]) -> bool:
        """Whether there is one to ask that was not tried."""
        return bool(self._living()) and any(replica not in tried for replica in self._able(key))

    def check(self) -> None:
        """NotReady where no replica answers."""
        if not self._living():
            raise NotReady("no replica answers; they are being replaced: send the request again", retry_after_s=_RETRY_AFTER_S)

    def _able(self, key: Key | None, without: Collection[Replica] = ()) -> list[Replica]:
        """The replicas that answer, have a healthy copy of the model and are not `without`, as far as there are such."""
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
        """Update to the available replicas. One that left while silent is lost; one that left in order finishes its calls."""
        now = time.monotonic()
        for replica in self._replicas.values():
            if replica.name not in names and now - replica.heard > _FRESH_S:
                replica.give_up()
        for name in sorted({*names} ^ {*self._names}):
            log.info("a replica has come" if name in names else "a replica has left", extra={"replica": name})
        self._replicas = {name: self._replicas.get(name) or Replica(name) for name in names}
        self._names = names

    # Whether they answer ---------------------------------------------------------------------------------------------------------------

    def healthy(self, key: Key) -> bool:
        """Whether any replica has answered that this model is."""
        return any(replica.models is not None and replica.models.get(key, False) for replica in self._living())

    async def ask(self) -> None:
        """Send a heartbeat to each, to learn whether its models are healthy; do not wait for silent ones."""
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
                replica.heard += max(now - expected - HEARTBEAT_S, 0)  # while this process stood still, nothing could be heard
                if now - replica.heard > SILENCE_S:
                    if not replica.lost:
                        log.warning("a replica is silent", extra={"replica": replica.name, "seconds": round(now - replica.heard, 1)})
                    replica.give_up()
                self._heartbeat(replica)
            expected = now + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self, replica: Replica) -> "asyncio.Task[None]":
        """One at a time to each."""
        if replica.beating is None or replica.beating.done():
            replica.beating = asyncio.create_task(self._ask(replica))
        return replica.beating

    async def _ask(self, replica: Replica) -> None:
        refused, self.refused = self.refused, Counter()
        try:
            async with asyncio.timeout(2 * SILENCE_S):
                said = await self.pool.call(replica.name, "heartbeat", dict(refused))
        except BaseException as error:
            self.refused.update(refused)  # for the next one
            if isinstance(error, ReplicaLost):
                replica.lost = True
            elif not isinstance(error, Exception):
                raise
            elif not isinstance(error, TimeoutError):  # of the way there: silence, whose reason the log has
                log.exception("a replica could not be asked")
            return
        replica.models = {(name, fingerprint): healthy for name, fingerprint, healthy, _ in said}
        replica.others = {(name, fingerprint): max(runs - replica.runs[name, fingerprint], 0) for name, fingerprint, _, runs in said}
        replica.hear()
