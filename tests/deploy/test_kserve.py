"""deploy/kserve: what KServe's API takes, and what the service and its other manifests have."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service import settings
from service.dialects import health
from service.dialects.oip import routes as oip
from tests.deploy.rendered import DEPLOY, KUBERNETES, OVERLAYS, bytes_of, environment, installed, manifests, serving
from tests.deploy.test_manifests import DEREGISTERED_S, STOPPING_S

pytestmark = pytest.mark.live

MOUNT = "/mnt/models"  # where KServe puts what storageUri names
# The fields that are used here, as KServe 0.20's API has them: pkg/apis/serving/v1alpha1 ServingRuntimeSpec and v1beta1 PredictorSpec.
RUNTIME = {"annotations", "supportedModelFormats", "protocolVersions", "multiModel", "containers", "volumes"}
PREDICTOR = {"minReplicas", "maxReplicas", "terminationGracePeriodSeconds", "automountServiceAccountToken", "model"}
MODEL = {"runtime", "modelFormat", "protocolVersion", "storageUri", "env"}


@pytest.fixture(scope="module")
def runtime() -> dict[str, Any]:
    (found,) = manifests("kserve")
    return found


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "kserve" / "example.yaml").read_text()))


def pod(runtime: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    """About what KServe makes of both: the runtime's containers with the model's environment, and the predictor's fields of a pod."""
    predictor = example["spec"]["predictor"]
    (container,) = runtime["spec"]["containers"]
    merged = {**container, "env": [*container["env"], *predictor["model"]["env"]]}
    of_the_pod = {name: predictor[name] for name in ("terminationGracePeriodSeconds", "automountServiceAccountToken")}
    return {"containers": [merged], "volumes": runtime["spec"]["volumes"], **of_the_pod}


def test_fields_are_those_of_kserve(runtime: dict[str, Any], example: dict[str, Any]) -> None:
    """The model is one that the runtime takes, whose container has the name into which KServe merges the model's own fields."""
    assert (runtime["apiVersion"], runtime["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    assert (example["apiVersion"], example["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    predictor, model = example["spec"]["predictor"], example["spec"]["predictor"]["model"]
    assert (runtime["spec"].keys(), predictor.keys(), model.keys()) == (RUNTIME, PREDICTOR, MODEL)
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert runtime["spec"]["containers"][0]["name"] == "kserve-container"
    template = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod(runtime, example)}
    kubernetes_validate.validate(template, KUBERNETES[-1], strict=True)


def test_the_service_starts_so(runtime: dict[str, Any], example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are known; container, probes and series have one port; the model answers to the InferenceService's name."""
    (container,) = pod(runtime, example)["containers"]
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    loaded = settings.load({})
    command, *flags = container["args"]
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert (command, given) == ("serve", {"--host": "0.0.0.0", "--port": "8080", "--bundle": MOUNT})
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {each["port"] for each in probes} == {container["ports"][0]["containerPort"]} == {int(given["--port"])}
    routes = {route.path for router in (health.router, oip.router) for route in router.routes}  # type: ignore[attr-defined]
    assert {each["path"] for each in probes} <= routes
    assert runtime["spec"]["annotations"]["prometheus.kserve.io/port"] == given["--port"]
    # The store is on the one volume that can be written, within its size.
    (volume,) = [each["emptyDir"] for each in runtime["spec"]["volumes"] if each["name"] == "tmp"]
    assert Path(loaded.states).parent == Path("/tmp")
    of_a_tenant = loaded.max_state_bytes * 17 / 16 + loaded.max_states * 3_100  # as deploy/README.md says, with the longest names and keys
    assert 4 * of_a_tenant < bytes_of(volume["sizeLimit"])
    # A bundle's folder has the bundle's name, unless it was exported under another --name.
    assert loaded.aliases == {example["metadata"]["name"]: Path(example["spec"]["predictor"]["model"]["storageUri"]).name}


def test_it_is_the_plain_pod(runtime: dict[str, Any], example: dict[str, Any]) -> None:
    """Rights, probes, resources, volumes and drain are those of overlays/plain, but for keys and what KServe itself makes."""
    found = installed(OVERLAYS["plain"])
    (plain,) = serving(found)
    (container,) = pod(runtime, example)["containers"]
    for part in ("image", "imagePullPolicy", "lifecycle", "resources"):
        assert container[part] == plain.container[part]
    for part in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert {**container[part], "httpGet": 0} == {**plain.container[part], "httpGet": 0}
    of_the_pod = {name: value for name, value in plain.spec["securityContext"].items() if name != "fsGroup"}
    assert container["securityContext"] == {**plain.container["securityContext"], **of_the_pod}
    kept = [each for each in plain.spec["volumes"] if each["name"] != "keys"]
    assert runtime["spec"]["volumes"] == kept
    assert [each["name"] for each in container["volumeMounts"]] == [each["name"] for each in kept]
    known = {each["name"]: each["value"] for each in container["env"]}
    assert known.items() - {("ATTNSERVE_ALIASES", json.dumps({"minilm": "all-MiniLM-L6-v2"}))} <= environment(found, plain).items()
    grace_s = example["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert DEREGISTERED_S + int(known["ATTNSERVE_DRAIN_TIMEOUT_S"]) + STOPPING_S <= grace_s
