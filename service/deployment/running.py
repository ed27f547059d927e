"""A private Ray on this machine, with the application: started, watched until it is ready, and taken down.

Flags of Ray Serve are read when its modules are imported, in every process, so they are set in the environment before ray is imported:
`prepare` must be called first.
"""

import logging
import math
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import psutil

from service.deployment.front import Front
from service.deployment.watch import Watch
from service.errors import CANNOT_START
from service.pools.limits import MESSAGE_BYTES
from service.settings import Settings

log = logging.getLogger("attnserve")

APPLICATION = "attnserve"
LOG_FILE = "attnserve.log"
_STARTED_BEFOREHAND = 2  # workers, side by side: for Serve's controller and the first replica
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # the least Ray takes; nothing of ours travels through it


# What profile `split` wants in the environment of every node of a cluster too.
CLUSTER_FLAGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": 1,
    "RAY_SERVE_ENABLE_HA_PROXY": 1,
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "service.replica.middlewares",
    "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).parent / "attnserve-haproxy"),
    # A gateway that is gone before the first byte of its answer: HAProxy asks another, if it has all of the
    # request (deploy/faults.md). No route has effects, so twice is as good as once.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": MESSAGE_BYTES,
    # A replica that fails its checks cannot finish its requests; Serve would wait for the longest stream. And Ray would wait 5 s for an
    # answer of a process that it is about to kill.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": 1,
    "RAY_kill_worker_timeout_milliseconds": 500,
    # Ray writes what a replica says on stderr to a file of its session, and Serve makes INFO records of it, which our level drops: both
    # leave it on the node's own stderr, which is what `kubectl logs` shows. Log files of Ray's session would end with the pod.
    "RAY_LOG_TO_STDERR": 1,
    "RAY_SERVE_LOG_TO_STDERR": 1,
    # Replicas say what a pool is scaled by. Without this, those that were there before `autoscaling_config` was would say nothing, and each
    # gateway would report requests in flight that nothing here reads.
    "RAY_SERVE_COLLECT_AUTOSCALING_METRICS_ON_HANDLE": 0,
    "RAY_USAGE_STATS_ENABLED": 0,
    "MALLOC_ARENA_MAX": 2,  # threads of a process share their heaps: less memory in each of Ray's processes
}


# Ray's HAProxy keeps an idle connection of a client for so long (Serve's `keep_alive_timeout_s`). A process of HAProxy that a reload has
# replaced still takes requests that come on one.
KEEP_ALIVE_S = 90
_SPARE_S = 30
_ELSEWHERE_S = 15  # about as long as a replica needs to start


def shutdown_s(settings: Settings) -> int:
    """How long Serve lets a replica of a cluster finish what it has: no request is longer."""
    return math.ceil(settings.request_timeout_s) + _SPARE_S


def cluster_flags(settings: Settings) -> dict[str, object]:
    """CLUSTER_FLAGS, and those that follow from the longest request."""
    return {
        **CLUSTER_FLAGS,
        # HAProxy is reloaded at every change of gateways. The old process ends with all that it carries so long afterwards.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": KEEP_ALIVE_S + shutdown_s(settings),
        # On SIGTERM `ray start --block` drains its node for at most so long. Serve starts replicas on other nodes; where there is no room
        # it stops those of the node, as at a scale down, when no more than `shutdown_s` is left.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": shutdown_s(settings) + _ELSEWHERE_S,
    }


class StartFailed(RuntimeError):
    """The service did not come up; the message says what stood in the way."""


@contextmanager
def run_directory() -> Iterator[Path]:
    """Everything that Ray and HAProxy write, in one place that is gone afterwards. In /tmp, wherever TMPDIR is: HAProxy takes paths of
    sockets up to 97 bytes, and Ray makes them 87 long from here on."""
    private = Path(tempfile.mkdtemp(prefix="attnserve-", dir="/tmp"))  # readable by us only; Ray opens its own directory to all users
    try:
        run = private / "run"
        run.mkdir()
        yield run
    finally:
        shutil.rmtree(private, ignore_errors=True)


def prepare(settings: Settings) -> None:
    """Set the flags that Ray reads at import, here and, through the environment, in every process it starts."""
    flags = {
        **cluster_flags(settings),
        # Requests bypass Ray (see `service/deployment/front.py`): it has no proxy and no port for them.
        "RAY_SERVE_ENABLE_HA_PROXY": 0,
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": 0,
        # The command itself asks replicas to finish what they have.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": 0,
        # Ray looks after few replicas: twice a second will do, and its controller rests. A start waits for several turns.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": 0.5,
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": 10_000,
        "RAY_enable_metrics_collection": 0,
        # Ray would kill replicas when the machine's memory is 95 % full, even if another program filled it. The limit of this service is
        # that of its cgroup, and a replica that the kernel kills is replaced.
        "RAY_memory_monitor_refresh_ms": 0,
        "RAY_worker_maximum_startup_concurrency": _STARTED_BEFOREHAND,  # of as many as there are cores by default
        "RAY_worker_niceness": 0,  # 15 by default: the service must not yield to other processes, and its client may be on this machine
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name in ("RAY_LOG_TO_STDERR", "RAY_SERVE_LOG_TO_STDERR"):  # the terminal is the command's, which shows the service's own log
        del flags[name]
    os.environ.update({name: str(value) for name, value in flags.items()})


class Service:
    """Ray, Serve and the application, running; a context manager's worth of processes that `stop` takes down again."""

    def __init__(self, settings: Settings, run: Path, front: Front, watch: Watch) -> None:
        self.settings = settings
        self._front = front
        self._watch = watch
        self.url = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{settings.port}"
        self._run = run
        self._deployed = False

    def start(self, progress: Callable[[str], None] = lambda step: None) -> None:
        """Bring everything up and return when every model is ready. StartFailed says why not."""
        progress("starting Ray")
        self._front.start()
        self._watch.start()
        self._start_ray()
        import ray
        from ray import serve

        progress("starting Ray Serve")
        self._start_serve(serve)
        progress("starting the replica")
        log_file = self._run / LOG_FILE
        if self.settings.profile == "split":
            from service.deployment import split

            application = split.build(self.settings, log_file)
        else:
            from service.deployment import single

            application = single.build(self.settings, log_file)
        target = serve.RunTarget(application, name=APPLICATION, route_prefix="/", logging_config={"encoding": "JSON"})
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

        unfinished = self._watch.drain(self.settings.drain_timeout_s)
        self._front.close()
        time.sleep(0.2)  # HAProxy closes the port while replicas still answer over open connections
        self._watch.stop()
        _hear_no_errors(ray)
        with suppress(Exception):
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        self._front.kill()
        return unfinished

    def kill(self) -> None:
        """Take every process down without waiting for anything, and the run directory with them."""
        self._watch.cease()
        self._front.kill()
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
        from ray._private import parameter, services

        # `ray.init` turns 127.0.0.1 into the machine's own address, opening every port to the network, and has no switch for the last two.
        # And without the first it starts a server of usage statistics, which are off, and waits for it.
        original, api_server = parameter.RayParams, services.start_api_server
        ours = {"node_ip_address": "127.0.0.1", "no_monitor": True, "include_log_monitor": False, "dashboard_agent_listen_port": 0}
        parameter.RayParams = lambda **given: original(**{**given, **ours})  # type: ignore[misc, assignment]
        services.start_api_server = lambda *_, **__: (None, None)
        try:
            ray.init(
                num_cpus=self._cpus(),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                namespace="serve",
                _temp_dir=str(self._run),
            )
        finally:
            parameter.RayParams, services.start_api_server = original, api_server  # type: ignore[misc]
        started: Any = ray._private.worker._global_node.all_processes  # type: ignore[attr-defined]
        names = {"Ray's raylet": "raylet", "Ray's GCS": "gcs_server"}
        self._watch.cannot_lose({name: psutil.Process(started[kind][0].process.pid) for name, kind in names.items()})

    def _start_serve(self, serve: Any) -> None:
        """Its controller, and none of its proxies."""
        serve.start(proxy_location="Disabled")

    def _cpus(self) -> int:
        """CPUs to declare to Ray, which starts as many workers in advance. `budget` sets the actual shares."""
        if self.settings.profile == "single":
            return _STARTED_BEFOREHAND
        from service.deployment import split

        return split.cpus(self.settings)

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
            if status is not None:
                for deployment in status.deployments.values():
                    if CANNOT_START in deployment.message:  # and would be tried again and again
                        raise StartFailed(_sentence(deployment.message))
                if status.status == "DEPLOY_FAILED":
                    raise StartFailed(f"the replica did not start: {status.message}")
            time.sleep(0.05)
        raise StartFailed("the service was not ready after 300 s")


def _hear_no_errors(ray: Any) -> None:
    """As `ray.shutdown` does later: Ray would print that calls of Serve's controller fail, which is how Serve ends it."""
    worker = ray._private.worker.global_worker
    worker.threads_stopped.set()
    worker.gcs_error_subscriber.close()


def _sentence(message: str) -> str:
    """What we said, among what Serve says around it: a traceback."""
    return next(line[line.index(CANNOT_START) :] for line in message.splitlines() if CANNOT_START in line)
