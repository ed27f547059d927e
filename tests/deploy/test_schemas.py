"""Every rendered manifest is what its API takes, without a cluster to ask."""

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.deploy.rendered import ALL, COMPONENTS, OVERLAYS, RAY_OVERLAYS, manifests, of_kind, with_component

pytestmark = pytest.mark.live

KUBERNETES = ("1.31", "1.37")  # the oldest that is looked after here, and the newest known to the validator
MONITORS = {"PodMonitor": "podMetricsEndpoints", "ServiceMonitor": "endpoints"}
SCHEMA = Path(__file__).parent / "schemas" / "rayservice-v1.schema.json.gz"


def strict(schema: Any) -> Any:
    """KubeRay's schema as JSON Schema that refuses what it does not know, as a server with strict field validation does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(value) for name, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        made["type"] = ["integer", "string"]
        made.pop("anyOf", None)
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        made.setdefault("additionalProperties", False)
    return made


@pytest.fixture(scope="module")
def ray_service_schema() -> jsonschema.Draft202012Validator:
    schema = strict(json.loads(gzip.decompress(SCHEMA.read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("overlay", ALL)
@pytest.mark.parametrize("version", KUBERNETES)
def test_kinds_of_kubernetes(overlay: str, version: str) -> None:
    """Every built-in kind holds to Kubernetes' own schema, unknown fields refused."""
    checked = [each for each in manifests(overlay) if each["kind"] not in (*MONITORS, "RayService")]
    assert checked
    for each in checked:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("overlay", RAY_OVERLAYS)
def test_ray_service(overlay: str, ray_service_schema: jsonschema.Draft202012Validator) -> None:
    (service,) = of_kind(manifests(overlay), "RayService")
    assert service["apiVersion"] == "ray.io/v1"
    ray_service_schema.validate(service)


def test_ray_service_schema_refuses(ray_service_schema: jsonschema.Draft202012Validator) -> None:
    """A misspelled key and a missing one are found: the validator is not one that lets everything pass."""
    (service,) = of_kind(manifests("base"), "RayService")
    misspelled = json.loads(json.dumps(service))
    misspelled["spec"]["rayClusterDeletionDelay"] = 60
    missing = json.loads(json.dumps(service))
    del missing["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"]
    for wrong in (misspelled, missing):
        assert not ray_service_schema.is_valid(wrong)


@pytest.mark.parametrize("overlay", RAY_OVERLAYS)
def test_pod_templates_of_ray(overlay: str) -> None:
    """KubeRay's schema knows pods only loosely: as pods of their own they hold to Kubernetes' schema."""
    (service,) = of_kind(manifests(overlay), "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_monitors(overlay: str) -> None:
    """The Prometheus operator's kinds: one a service, with the fields that are used here spelled as its API has them."""
    (monitor,) = [each for each in manifests(overlay) if each["kind"] in MONITORS]
    endpoints = MONITORS[monitor["kind"]]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) <= {"selector", endpoints, "podTargetLabels", "jobLabel"}
    fields = {"port", "path", "params", "interval", "relabelings", "metricRelabelings"}
    assert all(set(each) <= fields for each in monitor["spec"][endpoints])
    for relabeling in (one for each in monitor["spec"][endpoints] for one in each.get("relabelings", ())):
        assert set(relabeling) == {"targetLabel", "replacement"}
    for relabeling in (one for each in monitor["spec"][endpoints] for one in each.get("metricRelabelings", ())):
        assert set(relabeling) == {"sourceLabels", "regex", "targetLabel", "replacement"}


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("component", [*COMPONENTS, "incremental-upgrade"])
def test_components(overlay: str, component: str, tmp_path: Path, ray_service_schema: jsonschema.Draft202012Validator) -> None:
    """What a component makes of an overlay is as good."""
    for each in with_component(tmp_path, overlay, component):
        if each["kind"] == "RayService":
            ray_service_schema.validate(each)
        elif each["kind"] not in MONITORS:
            kubernetes_validate.validate(each, KUBERNETES[-1], strict=True)
