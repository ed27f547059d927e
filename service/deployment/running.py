"""Starts a private Ray on this machine with the application, waits until the service is ready, and stops everything."""

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
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum; our calls do not use the object store


@contextmanager
def run_directory() -> Iterator[Path]:
    """Create a directory for all files of Ray and HAProxy, and remove it at the end. It is always in /tmp, whatever TMPDIR is, because
    HAProxy takes socket paths of up to 97 bytes, and Ray's paths in this directory have 87."""
    private = Path(tempfile.mkdtemp(prefix="attnserve-", dir="/tmp"))  # readable only by this user, unlike directories that Ray makes
    try:
        run = private / "run"
        run.mkdir()
        yield run
    finally:
        shutil.rmtree(private, ignore_errors=True)


class Service:
    """The running service on this machine: Ray, Serve and the application. `stop` ends all of its processes."""

    def __init__(self, settings: Settings, run: Path, front: Front, watch: Watch) -> None:
        self.settings = settings
        self._front = front
        self._watch = watch
        self.url = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{settings.port}"
        self._run = run
        self._deployed = False

    def start(self, progress: Callable[[str], None] = lambda step: None) -> None:
        """Start everything and return when every model is ready. Raises StartFailed with the reason if that is impossible."""
        progress("starting Ray")
        self._front.start()
        self._watch.start()
        self._start_ray()
        from ray import serve

        progress("starting Ray Serve")
        serve.start(proxy_location="Disabled")  # without a proxy: only Serve's controller starts
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
        self._wait_until_ready(serve)

    def stop(self) -> int:
        """Finish accepted requests, then stop everything. Returns how many requests could not be finished in time."""
        if not self._deployed:  # nothing was deployed, so there are no requests to finish, and a call of Serve would start a second Ray
            self.kill()
            return 0
        import ray
        from ray import serve

        from service.deployment import ray_private

        unfinished = self._watch.drain(self.settings.drain_timeout_s)
        self._front.close()
        time.sleep(0.2)  # wait until HAProxy has closed the port; replicas still answer requests on open connections
        self._watch.stop()
        ray_private.stop_printing_errors()
        with suppress(Exception):
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        self._front.kill()
        return unfinished

    def kill(self) -> None:
        """Kill every process at once and remove the run directory."""
        self._watch.cease()
        self._front.kill()
        # Repeat, because a process that is starting may start other processes.
        while processes := psutil.Process().children(recursive=True):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=3)
        shutil.rmtree(self._run.parent, ignore_errors=True)

    def _start_ray(self) -> None:
        """Start a private Ray on loopback, without the Python processes that are not needed (see `start_ray`)."""
        from service.deployment import ray_private

        # Ray starts one worker in advance for each CPU that it is given, so it is given few. `service/runtime/budget.py` divides the
        # machine's CPUs among the replicas.
        cpus = STARTED_BEFOREHAND
        if self.settings.profile == "split":
            from service.deployment import split

            cpus = split.cpus(self.settings)
        pids = ray_private.start_ray(self._run, cpus=cpus, object_store_bytes=_OBJECT_STORE_BYTES)
        names = {"Ray's raylet": "raylet", "Ray's GCS": "gcs_server"}
        self._watch.cannot_lose({name: psutil.Process(pids[kind]) for name, kind in names.items()})

    def _wait_until_ready(self, serve: Any) -> None:
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
                    if CANNOT_START in deployment.message:  # Serve would retry forever
                        raise StartFailed(_sentence(deployment.message))
                if status.status == "DEPLOY_FAILED":
                    raise StartFailed(f"the replica did not start: {status.message}")
            time.sleep(0.05)
        raise StartFailed("the service was not ready after 300 s")


def _sentence(message: str) -> str:
    """Return our own error line, extracted from Serve's traceback."""
    return next(line[line.index(CANNOT_START) :] for line in message.splitlines() if CANNOT_START in line)
