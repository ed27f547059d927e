"""The Serve configuration inside the RayService: Ray takes it, and what it starts answers, on the nodes that it is for."""

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.cluster.nodes import Cluster
from tests.deploy.rendered import OVERLAYS, deployments, environment, groups, installed, ray_service, serving
from tests.deploy.test_manifests import clusters, made
from tests.service.fakes import PATIENCE_S

pytestmark = pytest.mark.live

# The one place of the tests that says what a cluster imports.
IMPORT_PATH = "service.deployment.split:application"
KEY = "a-key-of-the-test"


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


def resources(group: dict[str, Any]) -> dict[str, int]:
    """A group's custom resources, as the shell of its pod gives them to `ray start`."""
    found: dict[str, int] = json.loads(json.loads(group["rayStartParams"]["resources"]))
    return found


@pytest.fixture(scope="module")
def cluster(classifier_bundle: Path, decoder_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The head and one worker of each group, with the environment, CPUs, custom resources and Serve configuration of the overlay `cpu`."""
    found = installed(OVERLAYS["cpu"])
    keys = tmp_path_factory.mktemp("keys") / "keys.json"  # what the Secret's volume has
    entry = {"name": "test", "sha256": sha256(KEY.encode()).hexdigest(), "tenant": "tests", "requests_per_minute": 600}
    keys.write_text(json.dumps([entry]))
    here = {"ATTNSERVE_BUNDLES": f"{classifier_bundle},{decoder_bundle}", "ATTNSERVE_API_KEYS_FILE": str(keys)}
    config = yaml.safe_load(ray_service(found)["serveConfigV2"])
    for deployment in config["applications"][0]["deployments"]:
        del deployment["autoscaling_config"]
        deployment["num_replicas"] = 1
    folder = Path(tempfile.mkdtemp(prefix="attnserve-", dir="/tmp"))  # short: HAProxy takes paths of sockets up to 97 bytes
    running = Cluster(folder, config, {**environment(found, serving(found)[0]), **here})
    try:
        running.start_head()
        for group, pod in zip(groups(found), serving(found), strict=True):
            cpus = int(pod.container["resources"]["limits"]["cpu"])
            running.start_worker(group["groupName"], cpus=cpus, resources=resources(group))
        running.deploy()
        running.until(running.settled, "every replica runs")
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


def ask(cluster: Cluster, worker: str, path: str, body: Any = None, key: str = KEY) -> bytes:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = Request(f"{cluster.url(worker)}{path}", json.dumps(body).encode() if body else None, headers)
    with urlopen(request, timeout=PATIENCE_S) as answer:
        return bytes(answer.read())


def test_the_rendered_cluster_answers(cluster: Cluster) -> None:
    """What KubeRay would send to a Ray with these flags comes up, places each pool in its group, and asks for its key on each worker."""
    homes = {"gateway": "encoders", "encoder": "encoders", "generator": "generators"}
    assert homes.keys() == deployments(installed(OVERLAYS["cpu"])).keys()
    for name, group in homes.items():
        assert [replica["node_ip"] for replica in cluster.replicas(name)] == [cluster.address(group)]
    for worker in ("encoders", "generators"):
        cluster.until(partial(cluster.ready, worker), f"a worker of {worker} answers")
        cluster.until(partial(ask, cluster, worker, "/-/healthz"), f"KubeRay's probe of {worker} is answered")
        with pytest.raises(HTTPError, match="401"):
            ask(cluster, worker, "/v1/models", key="not-a-key-of-it")
        models = [each["id"] for each in json.loads(ask(cluster, worker, "/v1/models"))["data"]]
        assert "tiny-decoder" in models
        body = {"model": "tiny-decoder", "prompt": "a", "max_tokens": 4, "ignore_eos": True}
        assert json.loads(ask(cluster, worker, "/v1/completions", body))["usage"]["completion_tokens"] == 4
