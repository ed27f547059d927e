"""The faults of the kill campaign (`streams.py`): kills or stops processes of a service, and waits until the service has recovered.

The service is called whole if it is ready and has all its processes; see `Service.whole`.
"""

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil

from loadtest.common import server
from loadtest.errors import LoadtestError
from loadtest.faults.kills import FLAGS, Victim, records
from service.deployment.ports import free_port

GENERATOR, GATEWAY, HAPROXY = "ServeReplica:attnserve:generator", "ServeReplica:attnserve:gateway", "haproxy"
WHOLE_S = 90.0  # longest wait in seconds until the service is whole again
_LEASE_S = 10.0  # a copy of LEASE_S in service/streams/lease.py, because a campaign treats the service as a black box
_STOPPED_S = 10.0  # SIGSTOP lasts this long: twice the silence after which a gateway treats a generator as lost
_LOOK_S = 0.1


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


class Redis:
    """A Redis server with an append-only file. It can be killed and then started again with its data."""

    def __init__(self, folder: Path) -> None:
        if (program := shutil.which("redis-server")) is None:
            raise LoadtestError("this fault needs redis-server: apt-get install redis-server")
        self.port = free_port()
        self._command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(folder),
            "--save",
            "",
            "--appendonly",
            "yes",
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, start_new_session=True)
        until(self.answers, "Redis")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def answers(self) -> bool:
        """Return whether Redis answers a PING, which it does once it has loaded its append-only file."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False


class Service:
    """A service in the deployment profile split. After all its processes are killed, it can be started again on its port with its
    states."""

    def __init__(self, bundle: Path, generators: int, states: str, redis: Redis | None = None) -> None:
        self.generators, self.redis = generators, redis
        self._bundle, self._states = bundle, states
        self._output = ""  # output of the service before its latest restart
        self._of_pool: list[str] = []  # the lines of the output that are about replicas
        self.victim = self._started(free_port())

    def _started(self, port: int) -> Victim:
        flags = (*FLAGS["split"], "--generators", str(self.generators), "--set", "drain_timeout_s=5")
        return Victim([self._bundle], flags, {"ATTNSERVE_STATES": self._states}, port=port)

    @property
    def port(self) -> int:
        return self.victim.port

    def output(self) -> str:
        return self._output + self.victim.output()

    def restart(self) -> None:
        self._output += self.victim.output()
        self.victim.stop()
        self.victim = self._started(self.port)

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the processes with this title, in the order of their start."""
        found = []
        for process in self.victim.family():
            with suppress(psutil.Error):
                if title in " ".join(process.cmdline()[:1]) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def pool(self) -> Pool:
        self._of_pool += [line for line in self.victim.new_lines() if '"a replica ' in line]
        return pool_of("\n".join(self._of_pool))

    def whole(self) -> bool:
        """Return whether the service is ready, has all its processes, and the gateway has logged the arrival of all generators."""
        pool = self.pool()
        processes = len(self.processes(GENERATOR)), len(self.processes(GATEWAY)), len(self.processes(HAPROXY))
        # `there` may exceed the number of generators: a killed gateway never logs that its generators have left.
        complete = pool.there >= self.generators and not pool.silent and processes[0] == self.generators and all(processes)
        return complete and server.answers(f"http://127.0.0.1:{self.port}/health/ready")

    def check(self) -> None:
        """Raise LoadtestError if the command has ended by itself."""
        if self.victim.process.poll() is not None:
            raise LoadtestError(f"the service ended with {self.victim.process.returncode}: {self.output()[-2000:]}")


def until(condition: Callable[[], bool], what: str, check: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + WHOLE_S
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise LoadtestError(f"{what} was not whole within {WHOLE_S:g} s")
        time.sleep(_LOOK_S)


@contextmanager
def service(bundle: Path, generators: int = 2, *, redis: bool = False) -> Iterator[Service]:
    """Start the service and stop it at the end of the `with` block. States are stored in a temporary directory or, with `redis`, in a new
    Redis."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = Redis(Path(folder)) if redis else None
        if store is not None:
            stack.callback(store.kill)
        running = Service(bundle, generators, folder if store is None else f"redis://127.0.0.1:{store.port}/0", store)
        stack.callback(lambda: running.victim.stop())  # noqa: PLW0108  # a lambda, because `restart` replaces the victim
        until(running.whole, "the service", running.check)
        yield running


# Faults: each harms a process, waits until the service has noticed or undone it, and returns the time of the fault (`time.time()`) -------


def _kill(title: str) -> Callable[[Service, Random], float]:
    def strike(running: Service, chance: Random) -> float:
        struck, before = chance.choice(running.processes(title)), running.pool()
        at = time.time()
        struck.kill()
        until(lambda: struck not in running.processes(title), title, running.check)
        if title == GENERATOR:
            until(lambda: running.pool().left > before.left, "the pool", running.check)
        return at

    return strike


def _stop(running: Service, chance: Random) -> float:
    """Stop a generator by SIGSTOP and return the time. Normally `attnserve serve` kills it while it is stopped, and Ray replaces it;
    otherwise it is continued after `_STOPPED_S` seconds."""
    struck, before = chance.choice(running.processes(GENERATOR)), running.pool()
    at = time.time()
    struck.suspend()
    with suppress(psutil.Error):
        struck.wait(_STOPPED_S)
    with suppress(psutil.Error):
        struck.resume()
    until(lambda: running.pool().left > before.left, "the pool", running.check)
    return at


def _stop_for_leases(running: Service, chance: Random) -> float:
    """Stop a generator for two lease periods, then continue it, and return the time at which it was stopped.

    `attnserve serve` is stopped for this time too, because it would kill the silent generator. So the generator continues in a service
    that has meanwhile moved its runs to another one.
    """
    struck, command, before = chance.choice(running.processes(GENERATOR)), psutil.Process(running.victim.process.pid), running.pool()
    command.suspend()
    at = time.time()
    struck.suspend()
    time.sleep(2 * _LEASE_S)
    struck.resume()
    command.resume()  # the command then prints the log records that the gateway wrote while the command was stopped
    until(lambda: running.pool().silences > before.silences, "the gateway's view of the stopped generator", running.check)
    return at


def _kill_all(running: Service, chance: Random) -> float:
    command = psutil.Process(running.victim.process.pid)
    command.suspend()  # so that it does not replace processes while they are being killed
    family = [*command.children(recursive=True), command]
    at = time.time()
    for process in family:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    running.victim.process.wait()
    psutil.wait_procs(family, 30)
    running.restart()
    return at


def _kill_redis(running: Service, chance: Random) -> float:
    assert running.redis is not None
    at = time.time()
    running.redis.kill()
    time.sleep(chance.uniform(0.0, 2.0))
    running.redis.start()
    return at


@dataclass(frozen=True)
class Fault:
    about: str
    strike: Callable[[Service, Random], float]
    resumes: bool = False  # whether clients lose their connections, and continue their streams with the id of the last event
    redis: bool = False  # whether the store is Redis
    generators: bool = False  # whether runs lose their generators; the gateway logs these losses


What = StrEnum("What", ["kill", "sigstop", "leases", "gateway", "haproxy", "service", "redis"])

FAULTS: dict[What, Fault] = {
    What.kill: Fault("a generator, by SIGKILL", _kill(GENERATOR), generators=True),
    What.sigstop: Fault(f"a generator, by SIGSTOP, then SIGCONT after {_STOPPED_S:g} s unless it was killed", _stop, generators=True),
    What.leases: Fault(
        f"a generator, by SIGSTOP for over {2 * _LEASE_S:g} s; the command that would kill it too", _stop_for_leases, generators=True
    ),
    What.gateway: Fault("the gateway, by SIGKILL", _kill(GATEWAY), resumes=True),
    What.haproxy: Fault("HAProxy, by SIGKILL", _kill(HAPROXY), resumes=True),
    What.service: Fault("every process of the service, by SIGKILL; it is started again", _kill_all, resumes=True),
    What.redis: Fault("the store, Redis with an append-only file, by SIGKILL; it is started again within 2 s", _kill_redis, redis=True),
}


def strike(running: Service, what: What, chance: Random) -> float:
    """Cause one fault, wait until the service is whole again, and return the time of the fault. Raises LoadtestError if the service does
    not recover."""
    at = FAULTS[what].strike(running, chance)
    until(running.whole, "the service", running.check)
    return at
