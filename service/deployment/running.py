"""Starts everything on this machine, waits until the service is ready, and stops everything."""

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from service.deployment import deployer
from service.deployment.front import Front
from service.deployment.watch import Watch
from service.errors import StartFailed
from service.settings import Settings, freeze

log = logging.getLogger("attnserve")

_END_S = 30.0  # longest wait for replicas to close what they have open, after their requests are finished


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
        self._ray = ""  # the address of Ray's GCS
        self._ready = False

    def start(self, progress: Callable[[str], None] = lambda step: None) -> None:
        """Start everything and return when every model is ready. Raises StartFailed with the reason if that is impossible."""
        self._front.start()
        self._watch.start()
        # Kept as long as the service runs: with it, Python would close the pipe whose end ends the process, and with the process Ray.
        self._deployer = process = _deployer(self._run)
        _order(process, {"settings": freeze(self.settings), "run": str(self._run), "url": self.url})
        assert process.stdout is not None
        for line in process.stdout:
            match json.loads(line):
                case {"step": step}:
                    progress(step)
                case {"started": {"address": str(address), "raylet": int(raylet), "gcs_server": int(gcs)}}:
                    self._ray = address
                    self._watch.cannot_lose({"Ray's raylet": psutil.Process(raylet), "Ray's GCS": psutil.Process(gcs)})
                case {"failed": reason}:
                    raise StartFailed(reason)
                case {"ready": True}:
                    self._ready = True
                    return
        raise StartFailed(f"the process that starts Ray has ended with status {process.wait()}")

    def stop(self) -> int:
        """Finish accepted requests, then stop everything. Returns how many requests could not be finished in time."""
        if not self._ready:
            self.kill()
            return 0
        process = _deployer(self._run, "end")
        unfinished = self._watch.drain(self.settings.drain_timeout_s)
        self._front.close()
        time.sleep(0.2)  # wait until HAProxy has closed the port; replicas still answer requests on open connections
        self._watch.stop()
        _order(process, {"address": self._ray})
        try:
            status: int | None = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            log.warning("the replicas did not end in order, and are killed", extra={"status": status})
        self.kill()
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


def _deployer(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start a process of `deployer.py` that gets no signals from the terminal. The kernel kills it when the command ends in any way."""
    # Python with -P, and Ray's workers in this process's working directory, do not take a folder `service` of the user's for ours.
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-P", "-m", deployer.__name__, *arguments]
    # While Serve shuts down, Ray prints that calls to its controller fail.
    output, errors = (subprocess.DEVNULL, subprocess.DEVNULL) if arguments else (subprocess.PIPE, None)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=errors, text=True, start_new_session=True, cwd=folder)


def _order(process: "subprocess.Popen[str]", order: dict[str, str]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the process has ended, which its status tells
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
