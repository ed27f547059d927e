"""The state of each replica of a pool, as one gateway sees it, and the choice of the replica for a request.

Inputs of encoders are sent to the replica with the fewest pending tokens from this gateway. Runs are sent to a replica with few runs, or,
if the request has a session, to the session's replica.

Each replica gets heartbeats. A replica whose connection failed gets no calls until it responds to a heartbeat. If a replica has not
responded to any heartbeat for `SILENCE_S`, all calls to it end with ReplicaLost. A replica that Serve stops, to update it or to scale down,
completes its calls. However, runs that can continue on another replica do so at once, because waiting for them could delay the stop by up
to `request_timeout_s`.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import secrets
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping
from typing import Any, Protocol

from service.errors import DeadlineExceeded, NotReady

log = logging.getLogger("attnserve")

HEARTBEAT_S = 1.0
# Seconds without an answer to a heartbeat after which a replica is lost. Longer than any request blocks an event loop, and short enough
# that a client waits less than ten seconds for a second attempt.
SILENCE_S = 5.0
_FRESH_S = 2.5  # seconds without a heartbeat after which a replica gets no new calls if there are other replicas
_LOOK_S = 0.05  # seconds between two looks for a first replica
_RETRY_AFTER_S = 5.0  # about the time that Serve takes to replace a replica

Key = tuple[str, str]  # a model's name and its bundle's fingerprint


class ReplicaLost(NotReady):
    """The replica that had the request has ended or does not respond."""

    elsewhere = True


class Pool(Protocol):
    """The replicas of one kind, as an interface. `service/deployment/split.py` implements it with Ray."""

    def replicas(self) -> tuple[str, ...]:
        """Return the names of the available replicas; the same object until the set changes. A new replica always has a new name."""
        ...

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        """Call a method of a replica and return its result. Cancelling the call cancels the work on the replica. Raises ReplicaLost."""
        ...

    def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Call a method of a replica and yield its messages. Closing the generator cancels the work on the replica. Raises ReplicaLost."""
        ...


class Replica:
    """One replica, as seen by this gateway."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Time of the last answer to a heartbeat; at first the present time, because Serve lists only replicas that passed a health check.
        self.heard = time.monotonic()
        self.lost = False
        self._leaves = False  # whether the replica is being stopped, so that its movable runs continue on another replica
        self.load = 0  # number of tokens in this gateway's pending calls
        self.runs: Counter[Key] = Counter()  # model -> number of this gateway's runs
        self.prompt_token_s: Mapping[Key, float] = {}  # model -> seconds that a token of a prompt takes, from the last heartbeat
        self.others: Mapping[Key, int] = {}  # model -> number of runs of other gateways, from the last heartbeat
        self.models: Mapping[Key, bool] | None = None  # whether each model is healthy, from the last heartbeat
        self.numerics: Mapping[Key, str] = {}  # model -> arithmetic of its engine, from the last heartbeat
        self.beating: asyncio.Task[None] | None = None
        # call -> the model if the call's runs can go on in another replica, else None. A dictionary keeps the
        # order in which the calls began, unlike a set, so that a simulation can be replayed.
        self._calls: dict[asyncio.Timeout, Key | None] = {}

    def fits(self, key: Key) -> bool:
        """Return whether the replica serves this model and the model is healthy. Returns True before the first heartbeat."""
        return self.models is None or self.models.get(key, False)

    def computes(self, key: Key, numerics: str) -> bool:
        """Return whether the replica has reported that it computes the model with this arithmetic. True if `numerics` is "" (any)."""
        return numerics in ("", self.numerics.get(key))

    def pending(self, key: Key) -> int:
        """Return the number of running and waiting runs of this model on the replica: this gateway's runs now, and other gateways' runs at
        the last heartbeat.
        """
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
            if not call.expired():  # an expired call is being cancelled already, and `reschedule` would raise an error
                call.reschedule(now)

    @property
    def movable(self) -> set[Key]:
        """Return the models whose runs on this replica can go on in another replica."""
        return {key for key in self._calls.values() if key is not None}

    def hand_over(self, key: Key) -> None:
        """End the calls with movable runs of this model with ReplicaLost, so that the runs go on in another replica."""
        self._leaves = True
        now = asyncio.get_running_loop().time()
        for call in [call for call, of in self._calls.items() if of == key and not call.expired()]:
            call.reschedule(now)

    @contextlib.asynccontextmanager
    async def asked(self, deadline: float = math.inf, tokens: int = 0, movable: Key | None = None) -> AsyncIterator[None]:
        """Return a context for one call of the replica. It raises ReplicaLost as soon as the replica is lost, and DeadlineExceeded at
        `deadline` (in seconds of time.monotonic()). `movable` is the model if the call's runs can go on in another replica, else None.
        Movable calls may end with ReplicaLost when the replica is stopped.
        """
        self.load += tokens
        left_s = deadline - time.monotonic()
        call = asyncio.timeout(None if left_s == math.inf else max(left_s, 0))
        try:
            async with call:
                self._calls[call] = movable
                try:
                    yield
                finally:
                    del self._calls[call]
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("the request's deadline passed before its answer was there") from None
            if self._leaves:
                raise ReplicaLost("the replica that had the request is being stopped: send the request again") from None
            raise ReplicaLost(f"the replica that had the request has been silent for {SILENCE_S:g} s: send it again") from None
        except ReplicaLost:
            self.lost = True  # other calls continue, because a replica that is being stopped completes them
            raise
        finally:
            self.load -= tokens


class Replicas:
    """The replicas of one pool, and the models that they serve."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.described: Mapping[str, dict[str, Any]] = {}
        self.refused: Counter[str] = Counter()  # model -> tokens or runs that no replica accepted since the last heartbeat
        self.gateways = 1  # number of gateways, with this one, from the last heartbeat
        self._gateway = secrets.token_hex(8)
        self._names: tuple[str, ...] = ()
        self._replicas: dict[str, Replica] = {}
        self._leaving: list[Replica] = []  # replicas that are being stopped and still have movable runs
        self._beating: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Wait until a replica responds, then keep sending heartbeats to all replicas."""
        self._beating = asyncio.create_task(self._beat())
        while not self.described:
            await self.describe()
            await asyncio.sleep(0 if self.described else _LOOK_S)

    async def describe(self) -> None:
        """Ask one replica which models it serves, and store the answer."""
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
        """Return the replica with the fewest tokens in this gateway's calls, if possible one that is not in `without`. Raises NotReady if
        there is no replica.
        """
        return min(self._able(key, without), key=lambda replica: (replica.load, random.random()))

    def freest(self, key: Key, without: Collection[Replica] = (), numerics: str = "") -> Replica:
        """Choose two random replicas, and return the one with fewer runs. The runs of other gateways are known only from the last
        heartbeat. So if each gateway chose the least busy replica, all gateways would choose the same replica. (Mitzenmacher, The power of
        two choices in randomized load balancing, 2001.)
        """
        able = self._able(key, without, numerics)
        return min(random.sample(able, min(len(able), 2)), key=lambda replica: replica.pending(key))

    def owner(self, session: str, key: Key, without: Collection[Replica] = (), numerics: str = "") -> Replica:
        """Return the replica of a session, the same for every gateway. Rendezvous hashing (Thaler and Ravishankar 1998) makes sure
        that a new or lost replica moves only its own sessions. Raises NotReady if there is no replica."""
        able = self._able(key, without, numerics)
        return max(able, key=lambda replica: hashlib.blake2b(f"{replica.name} {session}".encode(), digest_size=8).digest())

    def others(self, key: Key, tried: Collection[Replica]) -> bool:
        """Return whether there is a replica that was not tried."""
        return bool(self._living()) and any(replica not in tried for replica in self._able(key))

    async def wait(self, deadline: float) -> None:
        """Wait until a replica responds, but not longer than `SILENCE_S` after the last heartbeat of any. During an update a gateway may
        learn of the new replica only after the last old one has closed its connection. Raises NotReady.
        """
        while not self._living():
            heard = max((replica.heard for replica in self._replicas.values()), default=-math.inf)
            if time.monotonic() >= min(heard + SILENCE_S, deadline):
                break
            await asyncio.sleep(_LOOK_S)
        self.check()

    def check(self) -> None:
        """Raise NotReady if no replica responds."""
        if not self._living():
            raise NotReady("no replica answers; they are being replaced: send the request again", retry_after_s=_RETRY_AFTER_S)

    def _able(self, key: Key | None, without: Collection[Replica] = (), numerics: str = "") -> list[Replica]:
        """Return the replicas that are not in `without`, respond, and have a healthy copy of the model with this arithmetic ("": any). A
        condition that no replica meets is dropped.
        """
        self.check()
        living, now = self._living(), time.monotonic()
        living = [replica for replica in living if replica not in without] or living
        fresh = [replica for replica in living if now - replica.heard < _FRESH_S] or living
        fit = [replica for replica in fresh if key is None or replica.fits(key)] or fresh
        return [replica for replica in fit if key is None or replica.computes(key, numerics)] or fit

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
        self._leaving += [replica for name, replica in self._replicas.items() if name not in names and not replica.lost]
        self._replicas = {name: self._replicas.get(name) or Replica(name) for name in names}
        self._names = names
        self._hand_over()

    def _hand_over(self) -> None:
        """Move runs away from replicas that are being stopped. A model's movable runs move as soon as another replica reports the model as
        healthy with the same arithmetic, because a replica with another arithmetic would reject the runs.
        """
        for replica in self._leaving:
            for key in replica.movable:
                if self.healthy(key, replica.numerics.get(key, "")):
                    log.info("runs of a replica that leaves go on elsewhere", extra={"replica": replica.name, "model": key[0]})
                    replica.hand_over(key)
        self._leaving = [replica for replica in self._leaving if replica.movable]

    # Heartbeats ------------------------------------------------------------------------------------------------------------------------

    def healthy(self, key: Key, numerics: str = "") -> bool:
        """Return whether at least one replica has reported this model as healthy, with this arithmetic ("": any)."""
        return any((replica.models or {}).get(key, False) and replica.computes(key, numerics) for replica in self._living())

    def has_numerics(self, key: Key, numerics: str) -> bool:
        """Return whether at least one replica has reported that it computes the model with this arithmetic."""
        return any(replica.computes(key, numerics) for replica in self._living())

    def prompt_token_s(self, key: Key) -> float:
        """Return the seconds that the pool takes for a token of this gateway's prompts, if all gateways send it as many."""
        known = [token_s for replica in self._living() if (token_s := replica.prompt_token_s.get(key))]
        return statistics.harmonic_mean(known) * self.gateways / len(known) if known else 0.0

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
                # The time in which this process was stopped does not count as silence, because it could not receive answers then.
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
                self.gateways, said = await self.pool.call(replica.name, "heartbeat", self._gateway, dict(refused))
        except BaseException as error:
            self.refused.update(refused)  # the heartbeat failed, so the next one sends these refusals again
            if isinstance(error, ReplicaLost):
                replica.lost = True
            elif not isinstance(error, Exception):
                raise
            # A TimeoutError is not logged here. It means that the replica is silent, which is logged elsewhere.
            elif not isinstance(error, TimeoutError):
                log.exception("a replica could not be asked")
            return
        replica.models = {(name, fingerprint): healthy for name, fingerprint, healthy, *_ in said}
        replica.others = {(name, fingerprint): max(runs - replica.runs[name, fingerprint], 0) for name, fingerprint, _, runs, *_ in said}
        replica.prompt_token_s = {(name, fingerprint): token_s for name, fingerprint, *_, token_s, _ in said}
        replica.numerics = {(name, fingerprint): numerics for name, fingerprint, *_, numerics in said}
        replica.hear()
        self._hand_over()
