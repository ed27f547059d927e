"""Runs Locust in other processes: a single one, or a master with workers on this machine."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtest.common.server import Program, free_port, tail
from loadtest.errors import LoadtestError
from loadtest.load.plan import LoadPlan

ROOT = Path(__file__).parents[2]
LOCUSTFILE = ROOT / "loadtest" / "users" / "planned.py"


def run(plan: LoadPlan, *, workers: int = 0, tick: Callable[[], None] = lambda: None) -> None:
    """Run the plan, and write samples and Locust's tables (locust_*.csv), page (locust.html) and log into the folder `plan.out`.

    `tick` is called a few times per second during the run. Raises LoadtestError if Locust fails.
    """
    plan = plan.model_copy(update={"out": plan.out.resolve()})  # absolute, because Locust runs in another working directory
    plan.out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = plan.out / "locust.log"
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary", "--exit-code-on-error", "0"]
    leading = [*command, "--plan", plan.model_dump_json(), "--csv", str(plan.out / "locust"), "--csv-full-history"]
    leading += ["--html", str(plan.out / "locust.html")]
    if workers:
        leading += ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(port), "--expect-workers", str(workers)]
    following = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--worker", "--master-port", str(port)]
    log.unlink(missing_ok=True)
    how: dict[str, Any] = {"folder": plan.out, "log": log}  # its own folder, so that it reads no `locust.conf` of the current one
    how["env"] = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with ExitStack() as running:
        master, *_ = [running.enter_context(Program(each, **how)).process for each in (leading, *[following] * workers)]
        while master.poll() is None:
            tick()
            time.sleep(0.2)
    if master.returncode:
        raise LoadtestError(f"locust ended with {master.returncode}; the end of {log}:\n{tail(log.read_text(errors='replace'))}")
