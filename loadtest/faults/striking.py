"""The faults of the kill campaign (`streams.py`): each kills or stops processes of a service, and waits until the service has recovered.

The service is called whole if it is ready and has all its processes; see `Service.whole`.
"""

import json
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil

from loadtest.common.redis import Redis
from loadtest.common.server import Service, until

GENERATOR, GATEWAY, HAPROXY = "ServeReplica:attnserve:generator", "ServeReplica:attnserve:gateway", "haproxy"
_LEASE_S = 10.0  # a copy of LEASE_S in service/streams/lease.py, because a campaign treats the service as a black box
_STOPPED_S = 10.0  # SIGSTOP lasts this long: twice the silence after which a gateway treats a generator as lost


class Pool(NamedTuple):
    """The generators of a service, by the log records of its gateways."""

    left: int  # number of records that a generator has left
    silences: int  # number of records that a generator has become silent
    there: int  # generators that have come and not left
    silent: int  # generators that are there but silent now


def pool_of(output: str) -> Pool:
    """Count the records about generators in the log `output`."""
    left, silences, there, silent = 0, 0, set[str](), set[str]()
    for record in records(output, "a replica (has come|has left|is silent|answers again)"):
        name, message = record["replica"], record["message"]
        if message == "a replica has come":
            there.add(name)
        elif message == "a replica has left":
            left += 1
            there.discard(name)
        elif message == "a replica is silent":
            silences += 1
            silent.add(name)
        else:
            silent.discard(name)
    return Pool(left, silences, len(there), len(silent & there))


class SplitService(Service):
    """A service in the deployment profile split, with generators in a pool. `states` is the place of its store."""

    def __init__(self, bundle: Path, generators: int, states: str, redis: Redis | None = None) -> None:
        self.generators, self.redis = generators, redis
        self._of_pool: list[str] = []  # the lines of the output that are about replicas
        flags = ("--profile", "split", "--generators", str(generators), "--set", "drain_timeout_s=5")
        super().__init__([bundle], *flags, env={"ATTNSERVE_STATES": states})

    def pool(self) -> Pool:
        self._of_pool += [line for line in self.new_lines() if '"a replica ' in line]
        return pool_of("\n".join(self._of_pool))

    def whole(self) -> bool:
        """Return whether the service is ready, has all its processes, and the gateway has logged the arrival of all generators."""
        pool = self.pool()
        generators, gateways, proxies = (len(self.processes(title)) for title in (GENERATOR, GATEWAY, HAPROXY))
        # `there` may exceed the number of generators: a killed gateway never logs that its generators have left.
        complete = pool.there >= self.generators and not pool.silent and generators == self.generators and bool(gateways and proxies)
        return complete and self.ready()

    def until(self, condition: Callable[[], object], what: str) -> None:
        until(condition, what, check=self.check)


def records(output: str, messages: str) -> Iterator[dict[str, Any]]:
    """Yield the log records whose message matches the regular expression `messages`."""
    for line in output.splitlines():
        if re.search(rf'"message": "({messages})"', line):
            yield json.JSONDecoder().raw_decode(line, line.index('{"time"'))[0]  # Ray's threads may add text to the line


@contextmanager
def service(bundle: Path, generators: int = 2, *, redis: bool = False) -> Iterator[SplitService]:
    """Start the service and stop it at the end of the `with` block. States are stored in a temporary directory or, with `redis`, in a new
    Redis."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(Redis(folder)) if redis else None
        running = stack.enter_context(SplitService(bundle, generators, str(folder) if store is None else store.url, store))
        running.until(running.whole, "the service is whole")
        yield running


# Each fault harms a process, waits until the service has noticed or undone it, and returns the time of the fault (`time.time()`) ----------


def _kill(title: str) -> Callable[[SplitService, Random], float]:
    def strike(running: SplitService, chance: Random) -> float:
        struck, before = chance.choice(running.processes(title)), running.pool()
        at = time.time()
        struck.kill()
        running.until(lambda: struck not in running.processes(title), f"{title} has ended")
        if title == GENERATOR:
            running.until(lambda: running.pool().left > before.left, "the generator has left the pool")
        return at

    return strike


def _stop(running: SplitService, chance: Random) -> float:
    """Stop a generator by SIGSTOP. Normally `attnserve serve` kills it while it is stopped, and Ray replaces it; otherwise it is continued
    after `_STOPPED_S` seconds."""
    struck, before = chance.choice(running.processes(GENERATOR)), running.pool()
    at = time.time()
    struck.suspend()
    with suppress(psutil.Error):
        struck.wait(_STOPPED_S)
    with suppress(psutil.Error):
        struck.resume()
    running.until(lambda: running.pool().left > before.left, "the generator has left the pool")
    return at


def _stop_for_leases(running: SplitService, chance: Random) -> float:
    """Stop a generator for two lease periods, then continue it.

    `attnserve serve` is stopped for this time too, because it would kill the silent generator. So the generator continues in a service
    that has meanwhile moved its runs to another one.
    """
    struck, before = chance.choice(running.processes(GENERATOR)), running.pool()
    running.process.send_signal(signal.SIGSTOP)
    at = time.time()
    struck.suspend()
    time.sleep(2 * _LEASE_S)
    struck.resume()
    running.process.send_signal(signal.SIGCONT)  # it then prints the records that the gateway wrote while it was stopped
    running.until(lambda: running.pool().silences > before.silences, "the gateway has noticed the stopped generator")
    return at


def _kill_all(running: SplitService, chance: Random) -> float:
    at = time.time()
    running.kill()
    running.start()
    return at


def _kill_redis(running: SplitService, chance: Random) -> float:
    assert running.redis is not None
    at = time.time()
    running.redis.process.kill()
    running.redis.process.wait()
    time.sleep(chance.uniform(0.0, 2.0))
    running.redis.start()
    return at


@dataclass(frozen=True)
class Fault:
    about: str
    strike: Callable[[SplitService, Random], float]
    resumes: bool = False  # whether clients lose their connections, and continue their streams with the id of the last event
    redis: bool = False  # whether the store is Redis


FAULTS = {
    "kill": Fault("a generator, by SIGKILL", _kill(GENERATOR)),
    "sigstop": Fault("a generator, by SIGSTOP until the command has killed it", _stop),
    "leases": Fault("a generator and the command, by SIGSTOP for two leases", _stop_for_leases),
    "gateway": Fault("the gateway, by SIGKILL", _kill(GATEWAY), resumes=True),
    "haproxy": Fault("HAProxy, by SIGKILL", _kill(HAPROXY), resumes=True),
    "service": Fault("every process of the service, by SIGKILL; it is started again", _kill_all, resumes=True),
    "redis": Fault("the store, a Redis, by SIGKILL; it is started again within 2 s", _kill_redis, redis=True),
}
