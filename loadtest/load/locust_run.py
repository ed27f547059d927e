"""Locust in processes of its own: one, or a master with workers on this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from loadtest.errors import LoadtestError
from loadtest.load.plan import Plan
from service.deployment.ports import free_port

ROOT = Path(__file__).parents[2]
LOCUSTFILE = ROOT / "loadtest" / "users" / "planned.py"
_STOP_S = 20


def run(plan: Plan, *, workers: int = 0, tick: Callable[[], None] = lambda: None) -> None:
    """Run the plan; its samples, Locust's own tables (locust_*.csv), its page (locust.html) and its log are then in `plan.out`.

    `tick` is called a few times a second meanwhile. LoadtestError when Locust fails.
    """
    plan = plan.model_copy(update={"out": plan.out.resolve()})  # absolute, since Locust's working directory is this folder
    plan.out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = plan.out / "locust.log"
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary", "--exit-code-on-error", "0"]
    leading = [*command, "--plan", plan.model_dump_json(), "--csv", str(plan.out / "locust"), "--csv-full-history"]
    leading += ["--html", str(plan.out / "locust.html")]
    if workers:
        leading += ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(port), "--expect-workers", str(workers)]
    following = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--worker", "--master-port", str(port)]
    with log.open("w") as output, started(leading, output, plan.out) as master, several(following, workers, output, plan.out):
        while master.poll() is None:
            tick()
            time.sleep(0.2)
    if master.returncode:
        raise LoadtestError(f"locust ended with {master.returncode}; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-15:]))


@contextmanager
def several(command: list[str], count: int, output: IO[str], folder: Path) -> Iterator[None]:
    if not count:
        yield
        return
    with started(command, output, folder), several(command, count - 1, output, folder):
        yield


@contextmanager
def started(command: list[str], output: IO[str], folder: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """The process, with the run's folder as working directory: a `locust.conf` in the caller's is for plain Locust. The process is ended
    in every case."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
