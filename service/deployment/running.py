"""A private Ray on this machine, with the application: started, watched until it is ready, and taken down."""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import psutil

from service.deployment.flags import STARTED_BEFOREHAND
from service.deployment.front import Front
from service.deployment.watch import Watch
from service.errors import CANNOT_START, StartFailed
from service.settings import Settings

log = logging.getLogger("attnserve")

APPLICATION = "attnserve"
LOG_FILE = "attnserve.log"
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # the least Ray takes; nothing of ours travels through it


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
            return STARTED_BEFOREHAND
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
    """Extract our error line from Serve's traceback."""
    return next(line[line.index(CANNOT_START) :] for line in message.splitlines() if CANNOT_START in line)
