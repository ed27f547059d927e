"""The Serve configuration inside the RayService: Ray takes it, and what it starts answers."""

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psutil
import pytest
import yaml

from service.deployment.flags import CLUSTER_FLAGS
from service.deployment.ports import free_ports
from tests.deploy.rendered import OVERLAYS, deployments, environment, installed, ray_service, serving
from tests.deploy.test_manifests import clusters, made
from tests.service.fakes import PATIENCE_S

pytestmark = pytest.mark.live

# The one place of the tests that says what a cluster imports.
IMPORT_PATH = "service.deployment.split:application"
KEY = "a-key-of-the-test"
READY_S = 600


@clusters
def test_serve_config_is_rays(install: str) -> None:
    """Ray's own schema takes it, and the application that it imports is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, as it is imported
        from ray.serve.schema import ServeDeploySchema

        module, _, function = IMPORT_PATH.partition(":")
        assert callable(getattr(import_module(module), function))
        config = ServeDeploySchema.model_validate(yaml.safe_load(ray_service(made(install))["serveConfigV2"]))
    assert [application.import_path for application in config.applications] == [IMPORT_PATH]


def keys_file(path: Path) -> Path:
    """What the Secret's volume has."""
    path.write_text(
        json.dumps([{"name": "test", "sha256": sha256(KEY.encode()).hexdigest(), "tenant": "tests", "requests_per_minute": 600}])
    )
    return path


class Cluster:
    """A Ray as KubeRay starts one: head alone, with the environment of the manifests, on ports that are free."""

    def __init__(self, variables: dict[str, str], folder: Path) -> None:
        self.port, self.dashboard_port, *ports = free_ports(8)  # at once, so that they differ
        self.token = "0123456789abcdef" * 2
        session = self.session = Path("/tmp") / f"attnserve-deploy-{os.getpid()}"  # short: HAProxy takes paths of sockets up to 97 bytes
        here = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "ATTNSERVE_API_KEYS_FILE": keys_file(folder / "keys.json"),
            "RAY_SERVE_HAPROXY_BINARY_PATH": CLUSTER_FLAGS["RAY_SERVE_HAPROXY_BINARY_PATH"],  # where this environment has it
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": folder / "haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": session / "admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": folder / "server-state",
            "RAY_SERVE_HAPROXY_METRICS_PORT": ports.pop(),
            "RAY_SERVE_HAPROXY_STATS_PORT": ports.pop(),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": ports.pop(),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": ports.pop(),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": 0.1,
        }
        ours = {name: text for name, text in os.environ.items() if not name.startswith(("RAY_", "ATTNSERVE_"))}
        command = ["setpriv", "--pdeathsig", "KILL", Path(sys.executable).parent / "ray"]
        command += ["start", "--head", "--block", "--num-cpus=16", "--object-store-memory=83886080"]
        command += [f"--port={ports.pop()}", f"--dashboard-port={self.dashboard_port}", f"--temp-dir={session}"]
        # What the workers of both groups have.
        command.append(f"--resources={json.dumps(dict.fromkeys(deployments(installed(OVERLAYS['cpu'])), 1))}")
        command += ["--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={ports.pop()}"]
        self.log = folder / "ray.log"
        session.mkdir()
        root = str(Path(__file__).parents[2])  # Ray's processes do not start in the checkout
        environ = {**ours, **variables, **{name: str(value) for name, value in here.items()}, "PYTHONPATH": root}
        with self.log.open("w") as log:
            self.process = subprocess.Popen([str(each) for each in command], env=environ, stdout=log, stderr=subprocess.STDOUT)

    def api(self, method: str, body: Any = None) -> Any:
        """Serve's configuration, as KubeRay's operator reads and writes it."""
        url = f"http://127.0.0.1:{self.dashboard_port}/api/serve/applications/"
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.token}"}
        request = Request(url, json.dumps(body).encode() if body else None, headers, method=method)
        try:
            with urlopen(request, timeout=PATIENCE_S) as answer:
                return json.loads(answer.read() or b"null")
        except HTTPError as error:
            raise URLError(f"{method} {error.code}: {error.read().decode()}") from error

    def ask(self, path: str, body: Any = None, key: str = KEY) -> Any:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        with urlopen(
            Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode() if body else None, headers), timeout=PATIENCE_S
        ) as got:
            return got.read()

    def stop(self) -> None:
        """Kill every process; what is just starting starts more."""
        with suppress(psutil.NoSuchProcess):
            while processes := psutil.Process(self.process.pid).children(recursive=True):
                for each in processes:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
                psutil.wait_procs(processes, timeout=3)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.session)


def eventually(attempt: Callable[[], Any], cluster: Cluster) -> Any:
    """What `attempt` gives once it gives something; an AssertionError with Ray's words when it never does."""
    deadline = time.monotonic() + READY_S
    last: object = None
    while time.monotonic() < deadline and cluster.process.poll() is None:
        try:
            if got := attempt():
                return got
        except (URLError, ConnectionError, TimeoutError) as error:
            last = error
        time.sleep(0.2)
    raise AssertionError(f"{last}\n{cluster.log.read_text()}")


@pytest.fixture(scope="module")
def cluster(classifier_bundle: Path, decoder_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("deploy")
    found = installed(OVERLAYS["cpu"])
    variables = {**environment(found, serving(found)[0]), "ATTNSERVE_BUNDLES": f"{classifier_bundle},{decoder_bundle}"}
    running = Cluster(variables, folder)
    try:
        yield running
    finally:
        running.stop()


def test_the_rendered_cluster_answers(cluster: Cluster) -> None:
    """What `kubectl apply -k deploy/overlays/cpu` has KubeRay send to a Ray with these flags comes up and asks for its key.

    One node stands for all: there is one replica of each pool, and the port is a free one.
    """
    config = yaml.safe_load(ray_service(installed(OVERLAYS["cpu"]))["serveConfigV2"])
    config["http_options"] = {"host": "127.0.0.1", "port": cluster.port}
    for deployment in config["applications"][0]["deployments"]:
        del deployment["autoscaling_config"]
        deployment["num_replicas"] = 1
    eventually(lambda: cluster.api("GET"), cluster)
    # Ray's dashboard starts Serve with the first of them; KubeRay's operator too tries again until it succeeds.
    eventually(lambda: cluster.api("PUT", config) or True, cluster)

    def states() -> dict[str, Any]:
        application = cluster.api("GET")["applications"].get("attnserve", {})
        assert application.get("status") not in ("DEPLOY_FAILED", "UNHEALTHY"), application["message"]
        return application["deployments"] if application.get("status") == "RUNNING" else {}

    running = eventually(states, cluster)
    eventually(lambda: cluster.ask("/health/ready") == b"ready", cluster)
    # KubeRay's probe of a worker, and what HAProxy asks.
    assert cluster.ask("/-/healthz")
    with pytest.raises(HTTPError, match="401"):
        cluster.ask("/v1/models", key="not-a-key-of-it")
    models = [each["id"] for each in json.loads(cluster.ask("/v1/models"))["data"]]
    assert "tiny-decoder" in models
    text = json.loads(cluster.ask("/v1/completions", {"model": "tiny-decoder", "prompt": "a", "max_tokens": 4, "ignore_eos": True}))
    assert text["usage"]["completion_tokens"] == 4
    cpus = {name: each["deployment_config"]["ray_actor_options"]["num_cpus"] for name, each in running.items()}
    assert cpus == {"gateway": 1, "encoder": 3, "generator": 3}
