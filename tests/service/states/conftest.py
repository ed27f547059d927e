"""Every engine of states, for the tests of what all of them promise."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from loadtest.common.server import free_port
from service.states.engine import StateEngine
from service.states.redis import RedisEngine
from service.states.sqlite import SqliteEngine
from tests.service.fakes import PATIENCE_S

PASSWORD = "secret-of-redis"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class RedisServer:
    """A Redis of the tests' own, with a password, or a cluster of one node. `appendfsync` None: without an append-only file."""

    def __init__(self, program: str, folder: Path, *, clustered: bool = False, appendfsync: str | None = "no") -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--requirepass", PASSWORD, "--dir", str(folder)]
        self._command += ["--save", ""]
        self._command += ["--appendonly", "no"] if appendfsync is None else ["--appendonly", "yes", "--appendfsync", appendfsync]
        # By default the nodes of a cluster talk at the port + 10,000, which another process may have.
        self._command += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())] if clustered else []
        self.start()
        if clustered:
            self.client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            self._wait_for(lambda: self.client.cluster("info")["cluster_state"] == "ok")

    def start(self) -> None:
        """Start it, with what it has on disk."""
        self.process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *self._command], stdout=subprocess.DEVNULL)
        self.client = redis.Redis(port=self.port, password=PASSWORD, retry=Retry(NoBackoff(), 0))
        self._wait_for(self.client.ping)

    def _wait_for(self, ready: Callable[[], object]) -> None:
        """AssertionError if Redis ends or is never ready."""
        for _ in range(int(PATIENCE_S / 0.025)):
            assert self.process.poll() is None, f"Redis ended with {self.process.returncode}: {self._command}"
            with suppress(redis.ConnectionError):  # also while it loads its file
                if ready():
                    return
            time.sleep(0.025)
        raise AssertionError("Redis is not ready")

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server_in(folder: Path, *, clustered: bool = False, appendfsync: str | None = "no") -> Iterator[RedisServer]:
    """A Redis with its files in the folder. Skips the test if there is no Redis on this machine."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("needs Redis: apt-get install redis-server")
    server = RedisServer(program, folder, clustered=clustered, appendfsync=appendfsync)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server_in(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server_in(tmp_path_factory.mktemp("redis-cluster"), clustered=True) as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


IN_REDIS = ("redis_server", "redis_cluster")


@pytest.fixture(params=["memory", "folder", "redis_server", pytest.param("redis_cluster", marks=pytest.mark.exhaustive)])
def opened(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Callable[[], StateEngine]]:
    """Opens the store; again, where it outlives its process."""
    made: list[StateEngine] = []

    def open_() -> StateEngine:
        if request.param == "memory" and made:
            return made[0]
        if request.param.startswith("redis"):
            server = request.getfixturevalue(request.param)
            if not made:
                server.client.flushall()
            made.append(RedisEngine(server.url, password=PASSWORD, clock=clock))
        else:
            made.append(SqliteEngine(None if request.param == "memory" else tmp_path / "states", clock=clock))
        return made[-1]

    yield open_
    for engine in made:
        engine.close()


@pytest.fixture
def engine(opened: Callable[[], StateEngine]) -> StateEngine:
    return opened()
