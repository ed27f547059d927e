"""The Helm chart as a whole: it makes what the APIs take, the overlays are it, and it refuses values that make no service."""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from service import settings
from tests.deploy.rendered import (
    CHART,
    DEPLOY,
    KUBERNETES,
    OVERLAYS,
    WITH_MONITORS,
    environment,
    helm,
    installed,
    manifests,
    of_kind,
    ours,
    pods,
    refused,
)

pytestmark = pytest.mark.live

MONITORS = {"PodMonitor": "podMetricsEndpoints", "ServiceMonitor": "endpoints"}
RAY = {"rayService": {"enabled": True}}
GPU = {"gpu": {"enabled": True}}
# Each is a way to install the chart that a schema must hold for.
INSTALLS: dict[str, dict[str, Any]] = {
    **OVERLAYS,
    "one": {"scaling": {"min": 1, "max": 1, "enabled": False}, "keys": {"secret": ""}, "bundles": ["/models/mine"]},
    "ray, fixed": {**RAY, "scaling": {"enabled": False, "min": 3}},
    "ray, encoders": {"rayService": {"enabled": True, "generators": False}, **GPU},
    "ray, gpu, ha": {"rayService": {"enabled": True, "ha": True, "separate": False}, **GPU},
    "ray, claim": {**RAY, "models": {"claim": "mine"}},
    "ray, fetch": {**RAY, "models": {"fetch": {"urls": ["gs://mine/minilm"]}}},
    "ray, redis": {**RAY, "states": {"redis": {"url": "redis://cache.example", "secret": ""}}},
    "ray, gateway": {"rayService": {"enabled": True, "incrementalUpgrade": {"gatewayClass": "istio"}}},
    "groups": {
        "rayService": {
            "enabled": True,
            "groups": {
                "encoders": {"cpu": 12, "max": 20, "nodeSelector": {"size": "large"}},
                "generators": {"min": 3, "max": 5, "tolerations": [{"key": "mine", "operator": "Exists"}]},
            },
        }
    },
    "oci": {"models": {"image": "registry.example/bundles@sha256:" + "0" * 64}},
    "states": {"states": {"claim": "mine"}, "scaling": {"min": 1, "max": 1}},
    "redis": {"states": {"redis": {"url": "rediss://store@cache.example:6380", "secret": "mine", "cidr": "10.1.0.0/16"}}},
    "scheduled": {
        **GPU,
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "mine", "operator": "Exists"}],
        "image": {"repository": "registry.example/attnserve", "digest": "sha256:" + "0" * 64, "pullSecrets": ["mine"]},
    },
    "traces": {"traces": {"endpoint": "http://otel-collector.monitoring:4318"}, "settings": {"LOG_LEVEL": "debug", "SLOTS": 64}},
}
# Settings that other values of the chart make.
MADE = {"BUNDLES", "API_KEYS", "API_KEYS_FILE", "HOST", "PORT", "PROFILE", "REQUEST_TIMEOUT_S", "DRAIN_TIMEOUT_S"}
MADE |= {"STATES", "THREADS", "PROVIDER", "GPU_MEMORY_GIB", "REPLICA_GPUS", "OTLP_ENDPOINT"}


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
    schema = strict(json.loads(gzip.decompress((Path(__file__).parent / "schemas" / "rayservice-v1.schema.json.gz").read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("install", INSTALLS)
def test_schemas(install: str, ray_service_schema: jsonschema.Draft202012Validator) -> None:
    """Every manifest is what its API takes, with pods of Ray as pods of their own, which KubeRay's schema knows only loosely."""
    found = installed(INSTALLS[install])
    checked = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod.spec} for pod in pods(found)]
    for each in (*checked, *found):
        if each["kind"] == "RayService":
            ray_service_schema.validate(each)
        elif each["kind"] in MONITORS:
            endpoints = MONITORS[each["kind"]]
            assert set(each["spec"]) <= {"selector", endpoints, "podTargetLabels", "jobLabel"}
            assert all(
                set(one) <= {"port", "path", "params", "interval", "relabelings", "metricRelabelings"} for one in each["spec"][endpoints]
            )
        elif each["kind"] != "PrometheusRule":
            for version in KUBERNETES:
                kubernetes_validate.validate(each, version, strict=True)


def test_ray_service_schema_refuses(ray_service_schema: jsonschema.Draft202012Validator) -> None:
    """A misspelled key and a missing one are found: the validator is not one that lets everything pass."""
    for wrong in ({"rayClusterDeletionDelay": 60}, {"rayClusterConfig": {"workerGroupSpecs": [{"groupName": "x"}]}}):
        (service,) = of_kind(installed(RAY), "RayService")
        assert not ray_service_schema.is_valid({**service, "spec": {**service["spec"], **wrong}})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_the_chart_with_its_values(overlay: str) -> None:
    """With kustomize and with Helm the same objects, so that the two ways to install it are one."""

    def by_name(found: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
        return {(each["kind"], each["metadata"]["name"]): each for each in found}

    assert by_name(manifests(f"overlays/{overlay}")) == by_name(installed(OVERLAYS[overlay], options=()))


@pytest.mark.parametrize("install", INSTALLS)
def test_settings_are_known_and_accepted(install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service starts with what the values make of its settings: an unknown or bad one would stop it in the cluster."""
    found, given = installed(INSTALLS[install]), INSTALLS[install]
    for pod in ours(found):
        for name, value in environment(found, pod).items():
            if name.startswith(settings.PREFIX):
                monkeypatch.setenv(name, value)
    loaded = settings.load({})
    assert [str(path) for path in loaded.bundles] == given.get("bundles", yaml.safe_load((CHART / "values.yaml").read_text())["bundles"])
    assert loaded.needs_key is (install not in ("one", "kind"))
    assert (loaded.provider == "cuda") is given.get("gpu", {}).get("enabled", False)
    assert (loaded.log_level, loaded.slots) == (("debug", 64) if install == "traces" else ("info", settings.Settings().slots))


def test_lint() -> None:
    for values in ({}, RAY):
        command = [helm(), "lint", "--strict", "--values", "-", str(CHART)]
        done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bundels": ["/models/mine"]}, "bundels"),
        ({"bundles": []}, "bundles"),
        ({"bundles": ["models/mine"]}, "bundles"),
        ({"resources": {"cpu": 1.5}}, "cpu"),
        ({"resources": {"memory": "3G"}}, "memory"),
        ({"rayService": {"worker": {"cpu": 7}}}, "cpu"),
        ({"rayService": {"groups": {"encoders": {"cpu": 2}}}}, "cpu"),
        ({"rayService": {"groups": {"writers": {"cpu": 4}}}}, "writers"),
        ({"rayService": {"enabled": True, "groups": {"encoders": {"min": 9}}}}, "min=9 of the encoders is more than max=8"),
        ({"scaling": {"min": 9}}, "scaling.min=9 is more than scaling.max=8"),
        ({"scaling": {"min": 0}}, "min"),
        ({"settings": {"API_KEYS": "a-secret-in-a-configmap"}}, "API_KEYS"),
        ({"settings": {"log_level": "debug"}}, "log_level"),
        ({"settings": {"STATES": "redis://mine"}}, "STATES"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"image": {"digest": "0123"}}, "digest"),
        ({"image": {"pullSecrets": ["My_Registry"]}}, "pullSecrets"),
        ({"monitors": "yes"}, "monitors"),
        ({"models": {"fetch": {"urls": ["file:///etc"]}}}, "urls"),
        ({"models": {"fetch": {"urls": ["s3://mine/minilm#sha256:12"]}}}, "urls"),
        ({"models": {"fetch": {"urls": ["s3://mine/one s3://mine/two"]}}}, "urls"),
        ({"models": {"fetch": {"urls": ["https://mine.example/one?signature=1"]}}}, "urls"),
        ({"models": {"claim": "mine", "image": "mine"}}, "set one of them"),
        ({"states": {"claim": "mine"}}, "states.claim is for one pod, and scaling allows 8"),
        ({"states": {"claim": "mine"}, **RAY}, "states.claim is for one pod, and a RayService has several"),
        ({"states": {"claim": "mine", "redis": {"url": "redis://mine:1"}}, "scaling": {"max": 1, "min": 1}}, "set one of them"),
        ({"states": {"redis": {"url": "redis://:password@mine:6379"}}}, "url"),
        ({"states": {"redis": {"secret": None}}}, "secret is required"),
        ({"keys": {"secret": "My_Keys"}}, "secret"),
        ({"networkPolicies": None}, "networkPolicies is required"),
    ],
    ids=str,
)
def test_bad_values_are_refused(values: dict[str, Any], said: str) -> None:
    assert said in refused(values)


def test_a_setting_that_the_service_has_not_is_refused() -> None:
    """The schema names all settings of the service, without those that other values make."""
    allowed = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["propertyNames"]["enum"]
    assert allowed == sorted({name.upper() for name in settings.Settings.model_fields} - MADE)


def test_defaults_are_in_the_schema() -> None:
    """Every value of values.yaml is one of the schema and the other way round, at every depth; a group's own numbers have no default."""

    def names(schema: dict[str, Any]) -> Any:
        return {name: names(each) for name, each in schema["properties"].items()} if "properties" in schema else None

    def given(values: Any, schema: Any) -> Any:
        return {name: given(each, schema.get(name)) for name, each in values.items()} if schema is not None else None

    known = names(json.loads((CHART / "values.schema.json").read_text()))
    del known["global"]
    for group in known["rayService"]["groups"].values():
        for own in ("min", "max", "nodeSelector", "tolerations"):
            del group[own]
    assert given(yaml.safe_load((CHART / "values.yaml").read_text()), known) == known


@pytest.mark.parametrize("values", [{}, OVERLAYS["ha"], INSTALLS["traces"]], ids=["plain", "ha", "traces"])
def test_two_releases_share_nothing(values: dict[str, Any]) -> None:
    """Two in one namespace: no object has the name of the other's, and no selector chooses the other's pods."""
    first, second = (installed(values, release) for release in ("attnserve", "other"))
    assert not {(each["kind"], each["metadata"]["name"]) for each in first} & {(each["kind"], each["metadata"]["name"]) for each in second}
    for each in first:
        for selector in (each.get("spec", {}).get("selector"), each.get("spec", {}).get("podSelector")):
            chosen = (selector or {}).get("matchLabels", selector)
            if chosen:
                assert any(chosen.items() <= pod.labels.items() for pod in pods(first)) or each["kind"] == "ServiceMonitor"
                assert not any(chosen.items() <= pod.labels.items() for pod in pods(second))


def test_a_long_name_is_refused_on_ray() -> None:
    assert "at most 47" in refused(RAY, "a" * 45)
    assert installed({}, "a" * 45)


@pytest.mark.parametrize("kind", [{}, RAY], ids=["plain", "ray"])
def test_settings_roll_the_pods(kind: dict[str, Any]) -> None:
    """Another content is another annotation of each pod's template; of Ray's all, which is what makes KubeRay start a second cluster. The
    ConfigMap keeps its name, since `helm rollback` cannot take up one that an upgrade left behind (helm/helm#8228)."""
    seen = [installed({**kind, **values}) for values in ({}, {"settings": {"LOG_LEVEL": "debug"}}, {"requestTimeoutSeconds": 301})]
    checksums = [{pod.annotations["checksum/settings"] for pod in ours(found)} for found in seen]
    assert [len(each) for each in checksums] == [1, 1, 1]
    assert len(set.union(*checksums)) == 3
    assert len({tuple(sorted(each["metadata"]["name"] for each in of_kind(found, "ConfigMap"))) for found in seen}) == 1


def test_rules_and_dashboards_are_those_of_their_folders() -> None:
    """For the release's namespace, with the labels by which kube-prometheus-stack selects; none without the Prometheus operator."""
    stack = {"release": "kube-prometheus-stack"}
    found = installed({"monitorLabels": stack})
    for each in of_kind(found, "PrometheusRule", "ServiceMonitor"):
        assert stack.items() <= each["metadata"]["labels"].items()
    rules = {each["metadata"]["name"]: each["spec"] for each in of_kind(found, "PrometheusRule")}
    texts = [(CHART / "rules" / f"{name}.yaml").read_text().replace('~"attnserve"', '~"mine"') for name in ("rules", "alerts")]
    assert rules == {each["metadata"]["name"]: each["spec"] for each in map(yaml.safe_load, texts)}
    maps = [each["data"] for each in of_kind(found, "ConfigMap") if each["metadata"]["labels"].get("grafana_dashboard") == "1"]
    files = {file.name: file.read_text() for file in (CHART / "dashboards").glob("*.json")}
    assert {name: text for each in maps for name, text in each.items()} == files
    for without in (installed({}, options=()), installed({"rules": False, "dashboards": False})):
        assert not of_kind(without, "PrometheusRule")
        assert not [each for each in of_kind(without, "ConfigMap") if "grafana_dashboard" in each["metadata"]["labels"]]


@pytest.mark.parametrize("values", [{}, RAY], ids=["plain", "ray"])
def test_monitors_need_their_kinds(values: dict[str, Any]) -> None:
    """A cluster without the Prometheus operator takes the chart as it is."""
    for monitors, options, count in (("auto", (), 0), ("auto", WITH_MONITORS, 1), ("always", (), 1), ("never", WITH_MONITORS, 0)):
        assert len(of_kind(installed({**values, "monitors": monitors}, options=options), *MONITORS)) == count


def test_make_kind() -> None:
    """The command builds the image that the overlay names, with the bundles in it, loads it into its cluster, and applies there."""
    dry = subprocess.run(["make", "--dry-run", "kind"], cwd=DEPLOY.parent, capture_output=True, text=True, check=True).stdout
    (pod,) = ours(installed(OVERLAYS["kind"]))
    image = pod.container["image"]
    steps = (
        f"docker build -f deploy/images/Dockerfile --target models -t {image} .",
        "kind create cluster --name attnserve",
        f"kind load docker-image {image} --name attnserve",
        "kubectl kustomize --enable-helm deploy/overlays/kind | kubectl --context kind-attnserve apply -f -",
        "kubectl --context kind-attnserve rollout status deployment/attnserve",
    )
    starts = [dry.index(step) for step in steps]
    assert starts == sorted(starts)
    assert pod.container["imagePullPolicy"] == "IfNotPresent"
