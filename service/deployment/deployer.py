"""The process that calls Ray for the command. The command itself does not import Ray, which would take 80 MiB while the service runs.

It gets an order as a line of JSON on stdin, and tells the command what happens by lines of JSON on what was its stdout, each with one of
the keys `step`, `started`, `failed` and `ready`. Whatever Ray prints goes to stderr. When the service is ready, this process has nothing
left to do, but Ray's processes are its children, and the kernel kills them when it ends. So it becomes `cat`, which takes less than a
megabyte and waits for the end of its stdin, that is of the command. To end the application, the command runs this module again, with the
argument `end`.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from service.deployment.flags import STARTED_BEFOREHAND
from service.deployment.ingress import APPLICATION
from service.errors import CANNOT_START, AttnserveError, StartFailed
from service.settings import Settings

LOG_FILE = "attnserve.log"
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum; our calls do not use the object store
_MOST_S = 300.0


def start(settings: Settings, run: Path, url: str, tell: Callable[..., None]) -> None:
    """Start Ray and the application, and return when every model is ready. Raises StartFailed with the reason if that is impossible.

    `run` is the directory for all files of Ray, `url` is where the service will answer, and `tell(key=value)` tells the command something.
    """
    from service.deployment import ray_private

    # Ray starts one worker in advance for each CPU that it is given, so it is given few. `service/runtime/budget.py` divides the machine's
    # CPUs among the replicas.
    cpus = STARTED_BEFOREHAND
    if settings.profile == "split":
        from service.deployment import split
        from service.deployment.scaling import check_gpus

        check_gpus(settings, ray_private.gpus_here())
        cpus = split.cpus(settings)
    tell(step="starting Ray")
    tell(started=ray_private.start_ray(run, cpus=cpus, object_store_bytes=_OBJECT_STORE_BYTES))
    from ray import serve

    tell(step="starting Ray Serve")
    serve.start(proxy_location="Disabled")  # without a proxy: only Serve's controller starts
    tell(step="starting the replica")
    if settings.profile == "split":
        application = split.build(settings, run / LOG_FILE)
    else:
        from service.deployment import single

        application = single.build(settings, run / LOG_FILE)
    target = serve.RunTarget(application, name=APPLICATION, route_prefix="/", logging_config={"encoding": "JSON"})
    serve.run_many([target], wait_for_applications_running=False)
    tell(step="loading models")
    _wait_until_ready(serve, url)


def _wait_until_ready(serve: Any, url: str) -> None:
    deadline = time.monotonic() + _MOST_S
    while time.monotonic() < deadline:
        try:
            with urlopen(f"{url}/health/ready", timeout=5):
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
    raise StartFailed(f"the service was not ready after {_MOST_S:.0f} s")


def _sentence(message: str) -> str:
    """Return our own error line, extracted from Serve's traceback."""
    return next(line[line.index(CANNOT_START) :] for line in message.splitlines() if CANNOT_START in line)


def main() -> None:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if sys.argv[1:] == ["end"]:
        from ray import serve  # here, because imports take a second, in which the command waits for requests to finish

        from service.deployment.ray_private import connect

        if line := sys.stdin.readline():
            connect(json.loads(line)["address"])
            serve.shutdown()  # type: ignore[no-untyped-call]
        return
    notes = os.fdopen(os.dup(1), "w")  # closed by `exec`
    os.dup2(2, 1)

    def tell(**note: Any) -> None:
        print(json.dumps(note), file=notes, flush=True)

    order = json.loads(sys.stdin.readline())
    try:
        start(Settings.model_validate_json(order["settings"]), Path(order["run"]), order["url"], tell)
    except (AttnserveError, OSError) as error:
        tell(failed=str(error))
        sys.exit(1)
    tell(ready=True)
    os.execvp("cat", ["cat"])


if __name__ == "__main__":
    main()
