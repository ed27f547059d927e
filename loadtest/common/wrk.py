"""Runs wrk, an HTTP load generator. wrk is written in C with epoll, so it takes little CPU time from the service on the same cores."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.errors import LoadtestError

SCRIPT = Path(__file__).with_name("bodies.lua")
TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Load:
    """The results of a wrk run. A latency is the time from the first byte of a request to the last byte of its answer."""

    connections: int
    requests: int
    duration_s: float
    p50_ms: float
    connect_errors: int
    read_errors: int
    write_errors: int
    status_errors: int
    timeouts: int
    repeated: int

    @property
    def per_s(self) -> float:
        return self.requests / self.duration_s

    @property
    def per_s_at_most(self) -> float:
        """Requests/s if half of the requests in flight at the end also count as answered.

        A server that answers in batches may be about to answer a whole batch when the run ends, and `per_s` counts none of its requests.
        """
        return (self.requests + self.connections / 2) / self.duration_s

    @property
    def problems(self) -> list[str]:
        """The reasons why this run is not valid; empty if it is valid."""
        errors = ("connect_errors", "read_errors", "write_errors", "status_errors", "timeouts")
        found = [f"{getattr(self, name)} {name.replace('_', ' ')}" for name in errors if getattr(self, name)]
        return found + ["texts were sent twice: too few were prepared"] * bool(self.repeated) + ["no request ended"] * (not self.requests)


def binary() -> str:
    """Return the path of wrk. No other load generator is used instead, because a slower one would make the service look slower."""
    if path := shutil.which("wrk"):
        return path
    raise LoadtestError(
        "wrk, the load generator, is not installed: `apt-get install wrk` on Debian and Ubuntu, `brew install wrk` on macOS"
    )


def version() -> str:
    if shutil.which("wrk") is None:
        return "not installed"
    return subprocess.run(["wrk", "--version"], check=False, capture_output=True, text=True).stdout.split("[")[0].strip()


def run(url: str, bodies: Sequence[str], *, connections: int, seconds: float) -> Load:
    """POST the bodies to `url` for `seconds`, over kept-alive connections with one request at a time on each. Raises LoadtestError if wrk
    fails."""
    with tempfile.NamedTemporaryFile("w", prefix="bodies-", suffix=".jsonl") as file:
        file.write("\n".join(bodies))
        file.flush()
        command = [binary(), "-t", "1", "-c", str(connections), "-d", f"{max(round(seconds), 1)}s", "--timeout", f"{TIMEOUT_S}s"]
        command += ["-s", str(SCRIPT), url, "--", file.name]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise LoadtestError(f"wrk failed on {url}: {(ended.stderr or ended.stdout).strip()}")
    return parse(ended.stdout, connections)


def parse(output: str, connections: int) -> Load:
    """Parse the line that `bodies.lua` prints at the end."""
    for line in output.splitlines():
        if line.startswith("RESULT "):
            return Load(connections=connections, **json.loads(line.removeprefix("RESULT ")))
    raise LoadtestError(f"wrk printed no result: {output.strip() or 'nothing'}")
