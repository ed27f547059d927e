"""A Ray cluster of several nodes on this machine. The service is deployed as an operator would do it; nodes and processes can be killed.

A node is a set of processes that `ray start` starts: a raylet, its agents and workers, and an HAProxy. Each has its own loopback address
(127.0.0.2, 127.0.0.3, ..; Linux has all of 127/8) and listens on the same ports, as on a separate machine. Network failures cannot be
tested: a killed node is noticed at once, because its sockets close.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import yaml

from loadtest.common.redis import Redis
from loadtest.common.server import Program, free_port, free_ports, until
from loadtest.errors import LoadtestError
from service.deployment import haproxy

APPLICATION = "attnserve"
WAIT_S = 300.0  # longest wait in seconds; a longer one counts as a hang. Replicas may start one after the other, on few cores
_ROOT = Path(__file__).parents[2]
_MARK = "LOADTEST_NODE"  # environment variable that every process of a node has, so that orphaned processes are found too
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # the minimum that Ray allows
_HEAD = "head"


class Cluster:
    """A cluster whose nodes have names; the name of the head is "head". Call `start` before any other method."""

    def __init__(self, folder: Path, config: Mapping[str, Any], flags: Mapping[str, str], *, redis: Path | None = None) -> None:
        """`folder` must be an empty folder with a short path. `config` and `flags` are the output of `attnserve config`. `redis` is the
        program redis-server; if it is given, the head stores its state in Redis."""
        self.folder = folder
        self.config: dict[str, Any] = json.loads(json.dumps(config))
        # All ports are chosen together, so that they differ.
        self.port, self._gcs_port, self._dashboard_port, self._redis_port, *self._proxy_ports = free_ports(8)
        self.config["http_options"] = {"host": "0.0.0.0", "port": self.port}
        self._token = secrets.token_hex(32)
        self._flags = {**flags, **self._on_one_machine()}
        self._redis = redis
        self._addresses: dict[str, str] = {}
        self._started: dict[str, Program] = {}
        self._mark = secrets.token_hex(8)
        self._over = threading.Event()

    # Nodes -------------------------------------------------------------------------------------------------------------------------------

    def start(self, workers: Sequence[str], *, cpus: int) -> None:
        """Start Redis if the cluster uses it, the head with no CPUs, and workers with `cpus` CPUs each."""
        if self._redis is not None:
            self.start_redis()
            self._flags["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{self._redis_port}"
        self.start_head()
        for name in workers:
            self.start_worker(name, cpus=cpus)

    def start_redis(self) -> None:
        """Start Redis, with the data of its previous run if there is any. `kill("redis")` ends it in the same way as a node."""
        data = self.folder / "redis"
        data.mkdir(exist_ok=True)
        # These options equal those in deploy/chart/templates/redis.yaml.
        flags = ("--requirepass", self._token, "--appendfsync", "always")
        how: dict[str, Any] = {"env": self._environment("redis", {}), "log": self.folder / "redis.log"}
        self._started["redis"] = Redis(data, *flags, port=self._redis_port, program=self._redis, **how)

    def start_head(self) -> None:
        """Start the head, either for the first time or again with the state that Redis has stored."""
        # Remove the file in which a killed head noted its address, because Ray would take that head for a running one. If the head were
        # started again on another machine, the file would not exist there.
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        arguments = ["--head", f"--port={self._gcs_port}", f"--dashboard-port={self._dashboard_port}", f"--temp-dir={self.folder / 'ray'}"]
        if self._redis is not None:
            arguments.append(f"--redis-password={self._token}")
        self._start_node(_HEAD, 0, arguments)
        self.until(lambda: self.api("GET") is not None, "the head answers")

    def start_worker(self, name: str, *, cpus: int, resources: Mapping[str, int] | None = None) -> None:
        """Start a worker, with custom `resources` of Ray beside one of its name, and return when it has joined. Starting several
        at once is slower than one after the other."""
        begun = "Ray runtime started"
        before = self.said(name).count(begun) if name in self._started else 0
        self._start_node(name, cpus, [f"--address={self.address(_HEAD)}:{self._gcs_port}"], resources)
        self.until(lambda: self.said(name).count(begun) > before, f"node {name} has started")

    @property
    def remembers(self) -> bool:
        """Whether a head that is started again restores its state, which requires that the cluster stores it in Redis."""
        return self._redis is not None

    def address(self, name: str) -> str:
        return self._addresses.setdefault(name, f"127.0.0.{len(self._addresses) + 2}")

    def url(self, name: str) -> str:
        """Return the URL of a node's HAProxy."""
        return f"http://{self.address(name)}:{self.port}"

    def said(self, name: str) -> str:
        """Return all that a node's processes have written to stdout and stderr, as `kubectl logs` would show it for a pod."""
        return self._started[name].output

    def processes(self, name: str, title: str = "") -> list[psutil.Process]:
        """Return a node's running processes whose command contains `title`: "ServeReplica:attnserve:encoder", "bin/haproxy", .."""
        found = set(self._started[name].family())
        for process in psutil.process_iter():  # finds orphans too; some processes overwrite their environment, so both searches are needed
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == f"{self._mark}-{name}":
                    found.add(process)
        return [process for process in found if _lives(process) and title in _command(process)]

    def kill(self, name: str, title: str = "") -> None:
        """Kill all processes that `processes` returns at the same moment, like a power failure. They are suspended first, so that none
        reacts to the end of another."""
        frozen: set[psutil.Process] = set()
        while fresh := set(self.processes(name, title)) - frozen:
            for process in fresh:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            frozen |= fresh
            if title:
                break
        for process in frozen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if not title:
            self._started[name].process.wait()
        psutil.wait_procs(frozen, timeout=WAIT_S)

    def ended(self, name: str) -> bool:
        """Whether the node's `ray start --block` has ended. In Kubernetes, this would end the node's pod."""
        return self._started[name].process.poll() is not None

    def terminate(self, name: str, timeout_s: float) -> None:
        """End a node as if its pod were deleted: send SIGTERM to `ray start --block`, which drains the node, and wait until it ends."""
        self._started[name].process.terminate()
        self.until(lambda: self.ended(name), f"node {name} has drained and ended", timeout_s)
        self.kill(name)  # kills the processes that Ray did not end

    def stop(self) -> None:
        """Kill all nodes. Every call of `until` that is waiting, in any thread, then raises an error."""
        self._over.set()
        for name in self._started:
            self.kill(name)

    # Serve -------------------------------------------------------------------------------------------------------------------------------

    def deploy(self, *, args: Mapping[str, Any] | None = None, **deployments: Mapping[str, Any]) -> None:
        """Change settings (`args`) and options of deployments, and deploy the changed configuration. Returns when Serve has begun to apply
        it.

        Changes are kept: the next call changes the configuration that this call deployed.
        """
        (application,) = self.config["applications"]
        application["args"].update(args or {})
        for deployment in application["deployments"]:
            for key, value in deployments.get(deployment["name"], {}).items():
                deployment[key] = {**deployment.get(key, {}), **value} if key == "user_config" else value
                if key == "autoscaling_config":
                    deployment.pop("num_replicas", None)
                elif key == "num_replicas":
                    deployment.pop("autoscaling_config", None)
        # On a busy machine the dashboard answers 500 until it has found the controller.
        self.until(lambda: self.api("PUT", self.config) is not None, "Ray's dashboard takes the configuration")

    def api(self, method: str, body: Any = None) -> Any:
        """Get or change Serve's configuration and state, by the HTTP API that `serve deploy`, `serve status` and KubeRay's operator use."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._token}"}
        url = f"http://127.0.0.1:{self._dashboard_port}/api/serve/applications/"
        with urlopen(Request(url, json.dumps(body).encode() if body else None, headers, method=method), timeout=30) as answer:
            return json.loads(answer.read() or b"{}")

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """Return the running replicas as Serve describes them: replica_id, node_ip, pid, .."""
        there = self.api("GET")["applications"].get(APPLICATION, {}).get("deployments", {}).get(deployment, {})
        return [each for each in there.get("replicas", []) if each["state"] == "RUNNING"]

    def settled(self) -> bool:
        """Return whether Serve has applied its configuration and no replica is starting or stopping. Raises LoadtestError if it failed."""
        application = self.api("GET")["applications"].get(APPLICATION, {})
        if application.get("status") == "DEPLOY_FAILED":
            raise LoadtestError(f"Serve could not deploy: {application['message']}")
        states = [each["state"] for deployment in application.get("deployments", {}).values() for each in deployment["replicas"]]
        healthy = all(deployment["status"] == "HEALTHY" for deployment in application.get("deployments", {}).values())
        return application.get("status") == "RUNNING" and healthy and set(states) == {"RUNNING"}

    def ready(self, *names: str) -> bool:
        """Return whether /health/ready answers 200 through the HAProxy of each of these nodes."""
        for name in names:
            urlopen(f"{self.url(name)}/health/ready", timeout=5).close()  # raises HTTPError unless the answer is 200
        return True

    def until(self, there: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
        """Call `there` until it returns a true value, and return this value. Failed connections are retried. Raises LoadtestError after
        `timeout_s` seconds."""

        def check() -> None:
            if self._over.is_set():
                raise LoadtestError(f"the cluster was stopped before this was true: {what}")

        try:
            return until(there, what, timeout_s, check=check, every_s=0.1)
        except LoadtestError as error:
            words = "\n".join(f"{name}: {started.output[-500:]}" for name, started in self._started.items())
            raise LoadtestError(f"{error}\n{words}") from None

    # -------------------------------------------------------------------------------------------------------------------------------------

    def _on_one_machine(self) -> dict[str, str]:
        """Return environment variables for a node: those that it needs because other nodes run on the same machine, and those that make it
        stop faster."""
        files = self.folder / "h"
        metrics, stats, http, grpc = self._proxy_ports
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # the value that KubeRay sets
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(files / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(files / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(files / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(files),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(files / "server-state"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(http),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc),
            # Seconds for which a stopping replica still accepts requests (30 by default). A short time is enough, because HAProxy learns
            # within a tenth of a second that the replica stops.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            # Interval at which HAProxy is checked (10 s by default). It is restarted after three failed checks.
            "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
            "RAY_worker_niceness": "0",  # no lower priority, because the client runs on the same machine (`attnserve serve` does the same)
            # Start no workers in advance. The default is one per CPU of a node, but here all nodes share the same CPUs.
            "RAY_prestart_worker_first_driver": "0",
            "PYTHONPATH": str(_ROOT),
        }

    def _start_node(self, name: str, cpus: int, arguments: Sequence[str], resources: Mapping[str, int] | None = None) -> None:
        address = self.address(name)
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", f"--node-ip-address={address}", f"--num-cpus={cpus}"]
        command += [
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--include-log-monitor=false",
            f"--resources={json.dumps({name: 100, **(resources or {})})}",
        ]
        command += [f"--dashboard-agent-listen-port={free_port()}", *arguments]
        self._run(name, command, {**self._flags, "RAY_SERVE_HAPROXY_BINARY_PATH": str(self._haproxy(name, address))})

    def _haproxy(self, name: str, address: str) -> Path:
        """Write a script that runs HAProxy for a node on the node's own address only."""
        wrapper = self.folder / f"haproxy-{name}"
        # Ray calls the script as: haproxy -db -f CONFIG .. It starts it in a session of its own, which outlives the node; so the kernel
        # kills it when the actor that has started it ends.
        addressed = f"s/^\\( *bind\\) [0-9.*]*:/\\1 {address}:/"
        wrapper.write_text(
            f'#!/bin/sh\nsed -i "{addressed}" "$3"\nexec setpriv --pdeathsig KILL "{sys.executable}" -I "{haproxy.__file__}" "$@"\n'
        )
        wrapper.chmod(0o700)
        return wrapper

    def _run(self, name: str, command: Sequence[str], flags: Mapping[str, str]) -> None:
        self._started[name] = Program(command, env=self._environment(name, flags), log=self.folder / f"{name}.log")

    def _environment(self, name: str, flags: Mapping[str, str]) -> dict[str, str | None]:
        theirs: dict[str, str | None] = dict.fromkeys(key for key in os.environ if key.startswith(("RAY_", "ATTNSERVE_")))
        return {**theirs, **flags, _MARK: f"{self._mark}-{name}"}


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def printed(bundles: Sequence[Path], *flags: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the two parts of the output of `attnserve config`: Serve's configuration, and the environment variables that every node
    needs."""
    command = [sys.executable, "-m", "service.cli", "config", *flags, *(part for bundle in bundles for part in ("--bundle", str(bundle)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=_ROOT, check=False)
    if done.returncode:
        raise LoadtestError(f"{' '.join(command)} failed: {done.stderr[-500:]}")
    noted = [line.removeprefix("#").strip().partition("=") for line in done.stdout.splitlines() if line.startswith("#   ")]
    return yaml.safe_load(done.stdout), {name: value for name, _, value in noted}


@contextmanager
def running(
    bundles: Sequence[Path], *flags: str, workers: Sequence[str] = ("one", "two"), cpus: int = 8, redis: Path | None = None
) -> Iterator[Cluster]:
    """Start a cluster with the service and yield it when every worker is ready. It is stopped and its folder removed at the end."""
    config, serve_flags = printed(bundles, *flags)
    folder = Path(tempfile.mkdtemp(prefix="attnserve-", dir="/tmp"))  # short, because HAProxy takes socket paths of up to 97 bytes
    cluster = Cluster(folder, config, serve_flags, redis=redis)
    try:
        cluster.start(workers, cpus=cpus)
        for deployment in cluster.config["applications"][0]["deployments"]:
            deployment["max_replicas_per_node"] = 1  # as the resources of deploy/chart: every node has the same share of the replicas
        cluster.deploy()
        cluster.until(cluster.settled, "every replica runs")
        cluster.until(lambda: cluster.ready(*workers), "every worker answers")
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
