"""What no schema says: the manifests agree with each other, with the service and with what KubeRay makes of them."""

import json
import re
import subprocess
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.main import get_command

from service import settings
from service.deployment import commands, fetching, scaling
from service.deployment.flags import CLUSTER_FLAGS, cluster_flags
from service.deployment.haproxy import KEEP_ALIVE_S
from service.deployment.scaling import replica_gpus
from service.telemetry.metrics import Metrics
from tests.deploy.rendered import (
    ALL,
    DEPLOY,
    OVERLAYS,
    RAY_OVERLAYS,
    Manifest,
    Pod,
    environment,
    manifests,
    of_kind,
    pods,
    ray_service,
    with_component,
)

pytestmark = pytest.mark.live

KUBERAY_LONGEST_NAME = 47  # of a RayService: it makes names of 63 out of it
RAY_PORTS = {"serve": 8000, "metrics": 8080}  # of KubeRay and Ray, where nothing else is said
HAPROXY = "RAY_SERVE_HAPROXY_BINARY_PATH"
HAPROXY_METRICS_PORT = 9101  # RAY_SERVE_HAPROXY_METRICS_PORT
SMALLEST_GPU_GIB = 15  # what CUDA reports of a card sold as 16 GB with ECC
DRIVER_GIB = 1  # the driver's context and the libraries of one process, rounded up
KIND_CPU, KIND_MEMORY = 4, 8 * 2**30  # the laptop
KIND_SYSTEM_CPU, KIND_SYSTEM_MEMORY = 0.95, 290 * 2**20  # requested by what kind itself runs on its one node
DEREGISTERED_S = 15  # until every node knows that a pod takes no new connections
STOPPING_S = 20  # for Ray to end after the last request


def all_pods(overlays: tuple[str, ...] = ALL) -> Iterator[tuple[str, Pod]]:
    return ((overlay, pod) for overlay in overlays for pod in pods(manifests(overlay)))


def ours(overlay: str) -> list[Pod]:
    return of_the_service(manifests(overlay))


def of_the_service(found: list[Manifest]) -> list[Pod]:
    """The pods that run the service itself."""
    return [pod for pod in pods(found) if pod.labels["app.kubernetes.io/name"] == "attnserve"]


def serving(overlay: str) -> Pod:
    (pod,) = [each for each in ours(overlay) if each.role != "head"]
    return pod


def serve_config(overlay: str) -> dict[str, Any]:
    return dict(yaml.safe_load(ray_service(overlay)["serveConfigV2"]))


def deployments(overlay: str) -> dict[str, dict[str, Any]]:
    """Serve's deployments by name."""
    return {each["name"]: each for each in serve_config(overlay)["applications"][0]["deployments"]}


def chosen(selector: dict[str, Any], found: list[Manifest]) -> list[Pod]:
    return [pod for pod in pods(found) if selector.get("matchLabels", {}).items() <= pod.labels.items()]


def cpus_of(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def bytes_of(quantity: str) -> int:
    units = {"Mi": 2**20, "Gi": 2**30}
    return int(quantity[:-2]) * units[quantity[-2:]]


# Settings ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_settings_are_known_and_accepted(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service starts with what the ConfigMap says: an unknown or bad setting would stop it in the cluster."""
    for pod in ours(overlay):
        for name, value in environment(manifests(overlay), pod).items():
            if name.startswith(settings.PREFIX):
                monkeypatch.setenv(name, value)
        loaded = settings.load({})
        assert loaded.bundles
        assert all(path.is_relative_to("/models") for path in loaded.bundles)
        assert loaded.provider == ("cuda" if overlay.startswith("overlays/gpu") else "cpu")


def test_keys_are_only_ever_secrets() -> None:
    """No key in a ConfigMap or a manifest: a pod has them as a file of its Secret, and without that does not start."""
    for overlay in ALL:
        assert not of_kind(manifests(overlay), "Secret")
        for each in of_kind(manifests(overlay), "ConfigMap"):
            assert not [name for name in each["data"] if name.endswith(("_KEY", "_KEYS", "_TOKEN", "_PASSWORD"))]
    for overlay in OVERLAYS:
        for pod in ours(overlay):
            file = Path(environment(manifests(overlay), pod)["ATTNSERVE_API_KEYS_FILE"])
            (mount,) = [each for each in pod.container["volumeMounts"] if each["mountPath"] == str(file.parent)]
            assert mount == {"name": mount["name"], "mountPath": str(file.parent), "readOnly": True}, "no subPath: it would not change"
            (volume,) = [each for each in pod.spec["volumes"] if each["name"] == mount["name"]]
            assert volume["secret"] == {"secretName": "attnserve-keys", "defaultMode": 0o440}, "uid 1000 reads it by fsGroup"
            assert pod.spec["securityContext"]["fsGroup"] == 1000
            assert f"create secret generic attnserve-keys --from-file={file.name}\n" in (DEPLOY / "README.md").read_text()


@pytest.mark.parametrize("overlay", RAY_OVERLAYS)
def test_head_and_workers_have_the_same_environment(overlay: str) -> None:
    """Flags of Ray Serve are read in every process: a node with others behaves otherwise."""
    head, worker = ours(overlay)
    assert (head.role, worker.role) == ("head", "worker")
    for part in ("image", "env", "envFrom"):
        assert head.container.get(part) == worker.container.get(part)
    flags = environment(manifests(overlay), head)
    needed = {name: str(value) for name, value in CLUSTER_FLAGS.items()}
    needed[HAPROXY] = f"/opt/attnserve/bin/{Path(needed[HAPROXY]).name}"  # where the image has it
    assert flags.items() >= needed.items()


def test_kind_needs_no_secret() -> None:
    """One command, and no Secret to create first: there are no keys, and the NetworkPolicy and a port-forward limit access."""
    (pod,) = ours("overlays/kind")
    known = environment(manifests("overlays/kind"), pod)
    loaded = settings.Settings(**{name.removeprefix(settings.PREFIX).lower(): value for name, value in known.items()})  # type: ignore[arg-type]
    assert not loaded.needs_key
    assert [each["name"] for each in pod.spec["volumes"]] == [each["name"] for each in pod.container["volumeMounts"]] == ["tmp", "shm"]
    assert "/etc/attnserve" not in str(manifests("overlays/kind"))


# Names, images, rights -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", ALL)
def test_names(overlay: str) -> None:
    for each in manifests(overlay):
        name = each["metadata"]["name"]
        assert name.startswith("attnserve")
        assert len(name) <= (KUBERAY_LONGEST_NAME if each["kind"] == "RayService" else 63)
        assert "namespace" not in each["metadata"]  # `kubectl -n` says where


def test_what_a_pod_names_is_there() -> None:
    """ConfigMaps and accounts of the same rendering; Secrets and claims that the runbook has people make."""
    runbook = (DEPLOY / "README.md").read_text()
    for overlay, pod in all_pods():
        there = {(each["kind"], each["metadata"]["name"]) for each in manifests(overlay)}
        if "serviceAccountName" in pod.spec:
            assert ("ServiceAccount", pod.spec["serviceAccountName"]) in there
        for source in pod.container.get("envFrom", ()):
            if "configMapRef" in source:
                assert ("ConfigMap", source["configMapRef"]["name"]) in there
            else:
                assert f"create secret generic {source['secretRef']['name']} " in runbook
        for variable in pod.container.get("env", ()):
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in runbook
        for volume in pod.spec.get("volumes", ()):
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in there


def test_images_are_pinned() -> None:
    """By a digest, or by a tag that stays; and a GPU's pods have the image that can use it."""
    for overlay, pod in all_pods():
        image = pod.container["image"]
        if re.search(r"@sha256:[0-9a-f]{64}$", image):
            continue
        _, _, tag = image.rpartition(":")
        assert "/" not in tag, f"{overlay}: {image} has no tag"
        assert tag != "latest"
        if pod.labels["app.kubernetes.io/name"] == "attnserve":
            assert tag.endswith("-gpu" if overlay.startswith("overlays/gpu") else "-cpu")


def autoscaled(overlay: str) -> bool:
    """Ray's autoscaler runs beside the head."""
    return overlay in RAY_OVERLAYS and "enableInTreeAutoscaling" in ray_service(overlay)["rayClusterConfig"]


def test_pods_have_no_rights() -> None:
    """No token but that of the autoscaler, which changes the number of workers: KubeRay gives a Role for that to the head's account."""
    for overlay, pod in all_pods():
        assert pod.spec["automountServiceAccountToken"] is False
        asks = autoscaled(overlay) and pod.role == "head"
        tokens = [each for each in pod.spec.get("volumes", ()) if "projected" in each]
        assert len(tokens) == asks
        assert not {each["name"] for each in tokens} & {mount["name"] for mount in pod.container.get("volumeMounts", ())}
        assert (pod.spec.get("serviceAccountName") == "attnserve-head") is asks
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    for overlay in ALL:
        assert not [each for each in manifests(overlay) if each["kind"] in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")]


def test_every_volume_is_bounded() -> None:
    for _, pod in all_pods():
        limit = bytes_of(pod.container["resources"]["limits"]["memory"])
        for volume in pod.spec.get("volumes", ()):
            if "emptyDir" in volume:
                size = bytes_of(volume["emptyDir"]["sizeLimit"])
                assert volume["emptyDir"].get("medium") != "Memory" or size < limit / 4  # it counts as the pod's memory


def test_limits() -> None:
    """Memory is never promised twice, and CPUs are whole: the service makes a runtime thread for each that its quota allows."""
    for _, pod in all_pods():
        resources = pod.container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
    for overlay in OVERLAYS:
        resources = serving(overlay).container["resources"]
        assert resources["requests"]["cpu"] == resources["limits"]["cpu"] == str(int(resources["limits"]["cpu"]))


def test_kind_fits_a_laptop() -> None:
    """4 CPUs and 8 GiB hold all pods beside kind's own, also while they are updated, and no kind of an operator is needed."""
    found = manifests("overlays/kind")
    assert {each["apiVersion"] for each in found} <= {"v1", "apps/v1", "networking.k8s.io/v1"}
    (deployment,) = of_kind(found, "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}, "a rolling update would need the room of two pods"
    asked = [(pod.container["resources"]["requests"], deployment["spec"]["replicas"]) for pod in pods(found)]
    assert sum(cpus_of(each["cpu"]) * count for each, count in asked) + KIND_SYSTEM_CPU < KIND_CPU
    assert sum(bytes_of(each["memory"]) * count for each, count in asked) + KIND_SYSTEM_MEMORY < KIND_MEMORY / 2  # the rest is the laptop's
    resources = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"] == str(int(resources["limits"]["cpu"]))


def test_make_kind() -> None:
    """The command builds the image that the overlay names, with the bundles in it, loads it into its cluster, and applies there."""
    dry = subprocess.run(["make", "--dry-run", "kind"], cwd=DEPLOY.parent, capture_output=True, text=True, check=True).stdout
    (pod,) = ours("overlays/kind")
    image = re.escape(pod.container["image"])
    steps = (
        rf"docker build .*--target models .*-t {image} \.",
        r"kind create cluster --name attnserve\b",
        rf"kind load docker-image {image} --name attnserve\b",
        r"kubectl --context kind-attnserve apply -k deploy/overlays/kind\b",
        r"kubectl --context kind-attnserve rollout status deployment/attnserve\b",
    )
    found = [re.search(step, dry) for step in steps]
    assert all(found), [step for step, match in zip(steps, found, strict=True) if not match]
    starts = [match.start() for match in found if match]
    assert starts == sorted(starts)
    assert pod.container["imagePullPolicy"] == "IfNotPresent"


@pytest.mark.parametrize("overlay", RAY_OVERLAYS)
def test_replicas_fit_the_workers(overlay: str) -> None:
    """As many replicas of each pool as workers, one on each, also where both follow the load. They leave a CPU for others beside them and
    share the GPU."""
    (group,) = ray_service(overlay)["rayClusterConfig"]["workerGroupSpecs"]
    known, limits = environment(manifests(overlay), serving(overlay)), serving(overlay).container["resources"]["limits"]
    for deployment in deployments(overlay).values():
        bounds = deployment.get("autoscaling_config", {})
        least, most = (bounds["min_replicas"], bounds["max_replicas"]) if bounds else [deployment["num_replicas"]] * 2
        assert (least, least, most) == (group["replicas"], group["minReplicas"], group["maxReplicas"])
        assert deployment["max_replicas_per_node"] == 1
    computing = len(deployments(overlay).keys() - {"gateway"})
    assert 1 + computing * int(known["ATTNSERVE_THREADS"]) == int(limits["cpu"]) - 1
    asked = {name: known[f"ATTNSERVE_{name.upper()}"] for name in ("provider", "replica_gpus") if f"ATTNSERVE_{name.upper()}" in known}
    assert computing * replica_gpus(settings.Settings(**asked), ("encoder", "decoder")) == int(limits.get("nvidia.com/gpu", 0))
    assert ray_service(overlay)["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_bundles_fit_the_gpu() -> None:
    """Encoder and generator share a device: the bounds of all bundles and what the driver keeps for each process are below the smallest."""
    known = environment(manifests("overlays/gpu"), serving("overlays/gpu"))
    bundles, processes = known["ATTNSERVE_BUNDLES"].split(","), round(1 / float(known["ATTNSERVE_REPLICA_GPUS"]))
    assert len(bundles) * float(known["ATTNSERVE_GPU_MEMORY_GIB"]) + processes * DRIVER_GIB <= SMALLEST_GPU_GIB


@pytest.mark.parametrize("overlay", [each for each in RAY_OVERLAYS if each != "base"])
def test_pools_and_workers_follow_the_load(overlay: str) -> None:
    """By the policy and the targets of the service, and with an autoscaler that may ask for workers and reach the Kubernetes API."""
    targets = {"gateway": scaling.GATEWAY_TARGET, "encoder": scaling.ENCODER_TARGET, "generator": scaling.GENERATOR_TARGET}
    for name, deployment in deployments(overlay).items():
        assert deployment["autoscaling_config"] == scaling.autoscaling(3 if overlay == "overlays/ha" else 2, 8, targets[name])
    assert autoscaled(overlay)
    (policy,) = [each for each in of_kind(manifests(overlay), "NetworkPolicy") if each["metadata"]["name"] == "attnserve-autoscaler"]
    assert [pod.role for pod in chosen(policy["spec"]["podSelector"], manifests(overlay))] == ["head"]


def test_runbook_changes_the_running_cluster() -> None:
    """KubeRay takes the number of workers from a RayService only for a new cluster, so the runbook patches the RayCluster of the one that
    runs: its spec is the RayService's `rayClusterConfig`."""
    (patch,) = re.findall(r"patch raycluster \$cluster --type=json -p '(.+)'", (DEPLOY / "README.md").read_text())
    for operation in json.loads(patch):
        _, spec, *path = operation["path"].split("/")
        assert (operation["op"], spec) == ("replace", "spec")
        there: Any = ray_service("overlays/cpu")["rayClusterConfig"]
        for part in path:
            there = there[int(part) if part.isdigit() else part]
        assert type(there) is type(operation["value"])


@pytest.mark.parametrize("overlay", [each for each in RAY_OVERLAYS if each != "base"])
def test_autoscaler(overlay: str) -> None:
    """Its container, which KubeRay makes beside the head's: restricted as ours are, with the token where Ray looks for it, and a bounded
    volume where KubeRay looks for one."""
    from ray.autoscaler._private.kuberay import node_provider

    (head, _) = ours(overlay)
    options = ray_service(overlay)["rayClusterConfig"]["autoscalerOptions"]
    assert options["version"] == "v2"  # KubeRay then sets restartPolicy, and refuses another than Never
    assert {each.spec.get("restartPolicy", "Never") for each in ours(overlay)} == {"Never"}
    assert options["securityContext"] == head.container["securityContext"]
    volumes = {each["name"]: each for each in head.spec["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in options["volumeMounts"]}
    assert "emptyDir" in volumes[mounts["/tmp"]]
    (token,) = [each["projected"] for path, name in mounts.items() for each in [volumes[name]] if path != "/tmp"]
    found = {Path(path) / item["path"] for path in mounts for source in token["sources"] for item in paths_of(source)}
    assert {Path(node_provider.IN_CLUSTER_TOKEN_PATH), Path(node_provider.IN_CLUSTER_CA_CERT_PATH)} <= found
    assert "sizeLimit" in volumes["ray-logs"]["emptyDir"]  # KubeRay's RayLogVolumeName


def paths_of(source: dict[str, Any]) -> list[dict[str, Any]]:
    """What one source of a projected volume puts there."""
    return source["configMap"]["items"] if "configMap" in source else [source["serviceAccountToken"]]


def test_plain_pods_follow_the_load() -> None:
    """By a series of the service that Prometheus' adapter gives Kubernetes under the name that is asked for."""
    (scaler,) = of_kind(manifests("overlays/plain"), "HorizontalPodAutoscaler")
    (deployment,) = of_kind(manifests("overlays/plain"), "Deployment")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]
    (metric,) = scaler["spec"]["metrics"]
    (rule,) = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    series = {sample.name for family in Metrics().registry.collect() for sample in family.samples} | {
        f"{family.name}_total" for family in Metrics().registry.collect()
    }
    assert rule["seriesQuery"].partition("{")[0] in series
    target = float(metric["pods"]["target"]["averageValue"].removesuffix("m")) / 1000
    assert target == min(scaling.ENCODER_TARGET, scaling.GENERATOR_TARGET)


# Ports, probes, networks, budgets --------------------------------------------------------------------------------------------------------


def ports(pod: Pod) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in pod.container["ports"]}


def test_ports() -> None:
    """Named as KubeRay looks for them, with the numbers that Ray, HAProxy and the service listen on."""
    for overlay in RAY_OVERLAYS:
        for pod in ours(overlay):
            assert ports(pod).items() >= RAY_PORTS.items()
        assert ports(serving(overlay))["haproxy"] == HAPROXY_METRICS_PORT
        assert serve_config(overlay)["http_options"] == {
            "host": "0.0.0.0",
            "port": RAY_PORTS["serve"],
            "keep_alive_timeout_s": KEEP_ALIVE_S,
        }
    assert ports(serving("overlays/plain")) == {"http": settings.Settings().port}
    (service,) = of_kind(manifests("overlays/plain"), "Service")
    assert service["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]
    assert chosen({"matchLabels": service["spec"]["selector"]}, manifests("overlays/plain"))


def test_probes_call_routes_of_the_service() -> None:
    from service.dialects import health

    routes = {route.path for route in health.router.routes}  # type: ignore[attr-defined]
    container = serving("overlays/plain").container
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in routes
        assert container[probe]["httpGet"]["port"] in ports(serving("overlays/plain"))
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"  # readiness fails while a queue is full or a start fails
    (monitor,) = of_kind(manifests("overlays/plain"), "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["path"] in routes


@pytest.mark.parametrize("overlay", RAY_OVERLAYS)
def test_a_busy_worker_stays_ready(overlay: str) -> None:
    """The probe of a worker asks HAProxy itself, and a few seconds without a CPU do not take every pod out of the Service at once."""
    probe = serving(overlay).container["readinessProbe"]
    assert probe["httpGet"] == {"path": "/-/healthz", "port": "serve"}  # as test_the_rendered_cluster_answers asks it
    assert probe["timeoutSeconds"] >= 5
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 20


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_monitors_find_their_ports(overlay: str) -> None:
    (monitor,) = [each for each in manifests(overlay) if each["kind"] in ("PodMonitor", "ServiceMonitor")]
    if monitor["kind"] == "ServiceMonitor":
        (service,) = of_kind(manifests(overlay), "Service")
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    else:
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert [pod for pod in chosen(monitor["spec"]["selector"], manifests(overlay)) if endpoint["port"] in ports(pod)]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_targets_have_the_labels_that_rules_ask_for(overlay: str) -> None:
    """job="attnserve"; the head told from workers; and no two targets of a pod with all labels in common, which Prometheus would mix up."""
    (monitor,) = [each for each in manifests(overlay) if each["kind"] in ("PodMonitor", "ServiceMonitor")]
    if monitor["kind"] == "ServiceMonitor":
        (service,) = of_kind(manifests(overlay), "Service")
        labels, endpoints = [service["metadata"]["labels"]], monitor["spec"]["endpoints"]
    else:
        labels = [pod.labels for pod in chosen(monitor["spec"]["selector"], manifests(overlay))]
        endpoints = monitor["spec"]["podMetricsEndpoints"]
        assert "app.kubernetes.io/component" in monitor["spec"]["podTargetLabels"]
        assert {each["app.kubernetes.io/component"] for each in labels} == {"head", "worker"}
    assert {each[monitor["spec"]["jobLabel"]] for each in labels} == {"attnserve"}
    names = [
        {"endpoint": each["port"]} | {one["targetLabel"]: one["replacement"] for one in each.get("relabelings", ())} for each in endpoints
    ]
    assert all(name not in names[:at] for at, name in enumerate(names))


def test_our_series_have_one_name() -> None:
    """The PodMonitor renames as deploy/prometheus/scrape.yaml does, in the spelling of its API."""
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yaml").read_text())
    (by_file,) = [each["metric_relabel_configs"] for each in scrape["scrape_configs"] if "metric_relabel_configs" in each]
    (monitor,) = of_kind(manifests("base"), "PodMonitor")
    spelled = {"source_labels": "sourceLabels", "target_label": "targetLabel"}
    renamed = [{spelled.get(name, name): value for name, value in each.items()} for each in by_file]
    assert monitor["spec"]["podMetricsEndpoints"][0]["metricRelabelings"] == renamed


@pytest.mark.parametrize("overlay", ["overlays/cpu", "overlays/plain"])
def test_one_line_gives_monitors_the_label_of_kube_prometheus_stack(overlay: str, tmp_path: Path) -> None:
    """The line of deploy/observability.md. Selectors stay as they are: a changed one would be refused or select nothing."""
    (line,) = re.findall(r"`(labels: \[.*?\])`", (DEPLOY / "observability.md").read_text())
    usual, labelled = with_component(tmp_path, overlay), with_component(tmp_path, overlay, more=line)
    (monitor,) = [each for each in labelled if each["kind"] in ("PodMonitor", "ServiceMonitor")]
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert [each.get("spec") for each in labelled] == [each.get("spec") for each in usual]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_budget(overlay: str) -> None:
    """One pod at a time may go, and the drain of a node is never blocked for good. A RayCluster has no scale from which Kubernetes could
    take the number that should be there, so its budget has the least number."""
    (budget,) = [each for each in of_kind(manifests(overlay), "PodDisruptionBudget") if each["metadata"]["name"] == "attnserve"]
    assert [pod.role for pod in chosen(budget["spec"]["selector"], manifests(overlay))] == [serving(overlay).role]
    bounds = {name: value for name, value in budget["spec"].items() if name != "selector"}
    if overlay == "overlays/plain":
        assert bounds == {"maxUnavailable": 1}
    else:
        assert bounds == {"minAvailable": ray_service(overlay)["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] - 1}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_network_policies(overlay: str) -> None:
    """Every pod is behind a policy; every port that Prometheus is to scrape is open to it, and Ray's own are open to no namespace."""
    found = manifests(overlay)
    policies = of_kind(found, "NetworkPolicy")
    for pod in pods(found):
        assert any(pod in chosen(each["spec"]["podSelector"], found) for each in policies)
    for policy in policies:
        for rule in policy["spec"].get("ingress", ()):
            foreign = [peer for peer in rule["from"] if "namespaceSelector" in peer]
            open_ports = {port["port"] for port in rule.get("ports", ())}
            assert not foreign or (open_ports and not open_ports & {6379, 10001, 52365})
            if foreign == [{"namespaceSelector": {"matchLabels": {"attnserve/access": "monitoring"}}}]:
                assert open_ports == {RAY_PORTS["serve"], RAY_PORTS["metrics"], HAPROXY_METRICS_PORT}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_names_are_asked_for_outside(overlay: str) -> None:
    """The one rule that leads to more than pods of this namespace is that of DNS, which also finds OpenShift's resolver and those of nodes
    and clouds; but for the head's to the Kubernetes API, where there is an autoscaler."""
    policies = [each for each in of_kind(manifests(overlay), "NetworkPolicy") if each["metadata"]["name"] != "attnserve-autoscaler"]
    rules = [rule for each in policies for rule in each["spec"].get("egress", ())]
    (names,) = [rule for rule in rules if any(peer.keys() != {"podSelector"} for peer in rule["to"])]
    assert {(port["port"], port["protocol"]) for port in names["ports"]} == {(port, way) for port in (53, 5353) for way in ("UDP", "TCP")}
    (namespaces,) = [peer["namespaceSelector"] for peer in names["to"] if "namespaceSelector" in peer]
    for each in ("kube-system", "openshift-dns"):
        assert selected(namespaces, {"kubernetes.io/metadata.name": each})
    blocks = [ip_network(peer["ipBlock"]["cidr"]) for peer in names["to"] if "ipBlock" in peer]
    for resolver in ("169.254.20.10", "169.254.169.253", "169.254.169.254", "168.63.129.16"):
        assert any(ip_address(resolver) in block for block in blocks)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_traces(overlay: str, tmp_path: Path) -> None:
    """The component names a collector to every pod of the service, and opens to them the port of that address and no other."""
    found = with_component(tmp_path, overlay, "traces")
    (policy,) = [each["spec"] for each in of_kind(found, "NetworkPolicy") if each["metadata"]["name"] == "attnserve-traces"]
    (rule,) = policy["egress"]
    assert chosen(policy["podSelector"], found) == of_the_service(found)
    for pod in of_the_service(found):
        address = urlsplit(environment(found, pod)["ATTNSERVE_OTLP_ENDPOINT"])
        assert [port["port"] for port in rule["ports"]] == [address.port]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_models_volume(overlay: str, tmp_path: Path) -> None:
    """The component gives every pod of the service the claim at /models, read-only: the head reads it too."""
    found = with_component(tmp_path, overlay, "models-volume")
    assert len(of_the_service(found)) == (1 if overlay == "overlays/plain" else 2)
    for pod in of_the_service(found):
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod.container["volumeMounts"]
        claim = {"claimName": "attnserve-models", "readOnly": True}
        assert {"name": "models", "persistentVolumeClaim": claim} in pod.spec["volumes"]


@pytest.mark.parametrize("components", [("fetch", "models-volume"), ("models-volume", "fetch")])
def test_two_components_that_mount_the_same_folder_are_refused(components: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"attnserve-bundles.* exists"):
        with_component(tmp_path, "overlays/plain", *components)


DIGEST = "0" * 64
MY_BUNDLES = """
images:
  - {name: attnserve, newName: registry.example/attnserve, digest: "sha256:DIGEST"}
  - {name: docker.io/library/redis, digest: "sha256:DIGEST"}
patches:
  - target: {kind: ConfigMap, name: attnserve-bundles}
    patch: |
      - {op: replace, path: /data/BUNDLE_URLS, value: "all-MiniLM-L6-v2=s3://bucket/minilm/7#sha256:DIGEST"}
""".replace("DIGEST", DIGEST)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_fetch(overlay: str, tmp_path: Path) -> None:
    """The component has an init step fill /models of every pod, which the service only reads, with bundles that the settings name; the way
    out is open for it, and there is room."""
    found = with_component(tmp_path, overlay, "fetch")
    (policy,) = [each["spec"] for each in of_kind(found, "NetworkPolicy") if each["metadata"]["name"] == "attnserve-fetch"]
    assert chosen(policy["podSelector"], found) == of_the_service(found)
    assert policy["egress"][0]["ports"] == [{"port": 443, "protocol": "TCP"}]
    assert len(of_the_service(found)) == (1 if overlay == "overlays/plain" else 2)
    for pod in of_the_service(found):
        (step,) = pod.spec["initContainers"]
        assert [step[part] for part in ("image", "imagePullPolicy", "securityContext")] == [
            pod.container[part] for part in ("image", "imagePullPolicy", "securityContext")
        ]
        assert step["volumeMounts"] == [{"name": "models", "mountPath": "/models"}]
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod.container["volumeMounts"]
        urls = environment(found, pod, step)["BUNDLE_URLS"].split()
        there = {f"/models/{fetching.parse(url).name}" for url in urls}
        assert there == set(environment(found, pod)["ATTNSERVE_BUNDLES"].split(","))
        (secret,) = [source["secretRef"] for source in step["envFrom"] if "secretRef" in source]
        assert secret["optional"] is True
        assert f"create secret generic {secret['name']} " in (DEPLOY / "README.md").read_text()
        on_disk = [each["emptyDir"] for each in pod.spec["volumes"] if each.get("emptyDir", {"medium": "Memory"}).get("medium") != "Memory"]
        assert sum(bytes_of(each["sizeLimit"]) for each in on_disk) <= bytes_of(pod.container["resources"]["limits"]["ephemeral-storage"])
        (models,) = [each["emptyDir"] for each in pod.spec["volumes"] if each["name"] == "models"]
        given = dict(zip(step["args"][1::2], step["args"][2::2], strict=True))
        assert given["--to"] == "/models"
        assert float(given["--max-gib"]) * 2**30 < bytes_of(models["sizeLimit"])
        assert set(given) <= {option for each in get_command(commands.app).commands["fetch"].params for option in each.opts}


def test_fetch_with_urls_and_an_image_of_an_overlay(tmp_path: Path) -> None:
    """As deploy/README.md has it: the step gets both, and other URLs make other pods. An image by its digest keeps no tag, Redis' too."""
    usual = with_component(tmp_path, "overlays/ha", "fetch")
    mine = with_component(tmp_path, "overlays/ha", "fetch", more=MY_BUNDLES)
    assert all(re.search(rf"[a-z]@sha256:{DIGEST}$", pod.container["image"]) for pod in pods(mine))
    for before, pod in zip(of_the_service(usual), of_the_service(mine), strict=True):
        (step,) = pod.spec["initContainers"]
        assert step["image"] == pod.container["image"] == f"registry.example/attnserve@sha256:{DIGEST}"
        (wanted,) = map(fetching.parse, environment(mine, pod, step)["BUNDLE_URLS"].split())
        assert wanted == fetching.BundleRequest("s3://bucket/minilm/7", "all-MiniLM-L6-v2", DIGEST)
        assert step["envFrom"][0] != before.spec["initContainers"][0]["envFrom"][0], "a name with another hash"


def test_load_test_reaches_the_service() -> None:
    """Its address is a Service that there is: KubeRay names its own after the RayService."""
    (job,) = of_kind(manifests("load"), "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    url = {each["name"]: each.get("value") for each in container["env"]}["URL"]
    (service,) = of_kind(manifests("overlays/cpu"), "RayService")
    assert url == f"http://{service['metadata']['name']}-serve-svc:{RAY_PORTS['serve']}"
    (policy,) = of_kind(manifests("load"), "NetworkPolicy")
    peer = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert peer.items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= serving("overlays/cpu").labels.items()
    assert job["spec"]["backoffLimit"] == 0


HA = [each for each in RAY_OVERLAYS if each.endswith("ha")]


@pytest.mark.parametrize("overlay", HA)
def test_ha(overlay: str) -> None:
    """Redis is where the GCS looks for it, with one password, and workers answer on without a head for longer than KubeRay has it."""
    found, cluster = manifests(overlay), ray_service(overlay)["rayClusterConfig"]
    options = cluster["gcsFaultToleranceOptions"]
    (redis,) = of_kind(found, "StatefulSet")
    (service,) = of_kind(found, "Service")
    assert options["redisAddress"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert chosen({"matchLabels": service["spec"]["selector"]}, found)[0].role == redis["metadata"]["name"]
    assert redis["spec"]["template"]["spec"]["containers"][0]["env"][0]["valueFrom"] == options["redisPassword"]["valueFrom"]
    (claim,) = redis["spec"]["volumeClaimTemplates"]
    (redis_server,) = redis["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"name": claim["metadata"]["name"], "mountPath": "/data"} in redis["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert "--dir /data --appendonly yes --appendfsync always " in redis_server
    for pod in ours(overlay):
        # KubeRay sets 600 unless it finds the name here; it does not look into envFrom.
        assert pod.container["env"] == [{"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "3600"}]


@pytest.mark.parametrize("overlay", HA)
def test_ha_keeps_what_it_is_added_to(overlay: str) -> None:
    """Scaling, images, settings, flags and times are those of the overlay: the component adds to it and says nothing about them."""
    before = "overlays/gpu" if "gpu" in overlay else "overlays/cpu"
    if overlay != "overlays/ha":  # which has other times and numbers, by its own patches
        assert serve_config(overlay) == serve_config(before)
        for mine, theirs in zip(ours(overlay), ours(before), strict=True):
            assert environment(manifests(overlay), mine) == environment(manifests(before), theirs)
            assert mine.spec["terminationGracePeriodSeconds"] == theirs.spec["terminationGracePeriodSeconds"]
    options = [ray_service(each)["rayClusterConfig"]["autoscalerOptions"] for each in (overlay, before)]
    assert options[0] == options[1]
    assert [each.container["image"] for each in ours(overlay)] == [each.container["image"] for each in ours(before)]


@pytest.mark.parametrize("overlay", HA)
def test_head_and_redis_are_not_lost_together(overlay: str) -> None:
    """They are evicted one after the other, and are on different nodes where there are two."""
    found = manifests(overlay)
    (budget,) = [each["spec"] for each in of_kind(found, "PodDisruptionBudget") if each["metadata"]["name"] == "attnserve-state"]
    both = chosen(budget["selector"], found)
    assert sorted(pod.role for pod in both) == ["attnserve-redis", "head"]
    # KubeRay's RayCluster has no scale: anything but this integer would be an error of the budget, and no pod could go.
    assert (budget["minAvailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    for pod in both:
        (spread,) = [each for each in pod.spec["topologySpreadConstraints"] if each["topologyKey"] == "kubernetes.io/hostname"]
        assert all(selected(spread["labelSelector"], each.labels) for each in both)


def selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Kubernetes' label selector, as far as it is used here."""
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in expressions)
    chosen_by_label = selector.get("matchLabels", {}).items() <= labels.items()
    return chosen_by_label and all(labels.get(each["key"]) in each["values"] for each in expressions)


@pytest.mark.parametrize("overlay", RAY_OVERLAYS)
def test_pods_spread(overlay: str) -> None:
    """Over nodes: workers among themselves, with `ha` without exception, and the head away from them. Kubernetes takes a pair of key and
    `whenUnsatisfiable` once."""
    for pod in pods(manifests(overlay)):
        spread = pod.spec["topologySpreadConstraints"]
        pairs = [(each["topologyKey"], each["whenUnsatisfiable"]) for each in spread]
        assert len(pairs) == len(set(pairs))
        assert all(selected(each["labelSelector"], pod.labels) for each in spread)
        strict = pod.role == "worker" and overlay in HA
        assert ("kubernetes.io/hostname", "DoNotSchedule" if strict else "ScheduleAnyway") in pairs
        # Without it the nodes that are there share the workers, be it a single one, and none is added.
        assert [each["minDomains"] for each in spread if each["whenUnsatisfiable"] == "DoNotSchedule"] == ([3] if strict else [])
        if pod.role == "head":
            assert all(selected(each["labelSelector"], serving(overlay).labels) for each in spread)


# Drain times ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", RAY_OVERLAYS)
def test_drain_times_of_ray(overlay: str) -> None:
    """request < end of a replica < drain of its node; HAProxy's old process may have a request come after an idle connection's 620 s. The
    pod's own end is after its sleep and drain, the old cluster's after that. Flags follow from the settings as in `cluster_flags`."""
    pod = serving(overlay)
    known = environment(manifests(overlay), pod)
    request_s, drain_s = float(known["ATTNSERVE_REQUEST_TIMEOUT_S"]), int(known["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    (replica_s,) = {deployment["graceful_shutdown_timeout_s"] for deployment in deployments(overlay).values()}
    sleep, sleep_s = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert request_s < replica_s < drain_s
    assert KEEP_ALIVE_S + request_s < int(known["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    assert int(sleep_s) == DEREGISTERED_S
    assert int(sleep_s) + drain_s + STOPPING_S <= pod.spec["terminationGracePeriodSeconds"]
    followed = cluster_flags(settings.Settings(request_timeout_s=request_s))
    assert {name: str(followed[name]) for name in followed.keys() - CLUSTER_FLAGS.keys()}.items() <= known.items()
    assert "ATTNSERVE_DRAIN_TIMEOUT_S" not in known  # Serve drains replicas here, and does not ask for it
    assert ray_service(overlay)["rayClusterDeletionDelaySeconds"] >= pod.spec["terminationGracePeriodSeconds"]
    # Where all pods of a cluster are deleted at once, the head is there until workers have drained.
    assert ours(overlay)[0].spec["terminationGracePeriodSeconds"] == pod.spec["terminationGracePeriodSeconds"]


def test_drain_times_of_a_plain_pod() -> None:
    pod = serving("overlays/plain")
    known = environment(manifests("overlays/plain"), pod)
    drain_s = float(known["ATTNSERVE_DRAIN_TIMEOUT_S"])
    sleep, sleep_s = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert float(known["ATTNSERVE_REQUEST_TIMEOUT_S"]) < drain_s
    assert int(sleep_s) + drain_s + STOPPING_S <= pod.spec["terminationGracePeriodSeconds"]


def test_drains_of_ha_are_longer() -> None:
    seconds = {each: serving(each).spec["terminationGracePeriodSeconds"] for each in RAY_OVERLAYS}
    assert seconds["overlays/ha"] > seconds["overlays/cpu"] == seconds["base"]


def test_runbook_has_these_drain_times() -> None:
    """The table of deploy/README.md, column for column."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in (DEPLOY / "README.md").read_text().splitlines() if "|" in line
    ]
    head = next(row for row in rows if row[1:] == ["cpu, gpu", "ha", "plain"])
    stated = {label.partition("`")[2].partition("`")[0] or label: cells for label, *cells in rows[rows.index(head) + 2 :][:8]}
    for column, overlay in enumerate(("overlays/cpu", "overlays/ha", "overlays/plain")):
        pod = serving(overlay)
        known = environment(manifests(overlay), pod)
        found = {
            "ATTNSERVE_REQUEST_TIMEOUT_S": known["ATTNSERVE_REQUEST_TIMEOUT_S"],
            "sleep of a pod before SIGTERM": pod.container["lifecycle"]["preStop"]["exec"]["command"][1],
            "terminationGracePeriodSeconds": str(pod.spec["terminationGracePeriodSeconds"]),
        }
        if overlay not in RAY_OVERLAYS:
            found["ATTNSERVE_DRAIN_TIMEOUT_S"] = known["ATTNSERVE_DRAIN_TIMEOUT_S"]
        else:
            found |= {
                "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": known["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"],
                "graceful_shutdown_timeout_s": str(deployments(overlay)["gateway"]["graceful_shutdown_timeout_s"]),
                "..._HARD_STOP_AFTER_S": known["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"],
                "rayClusterDeletionDelaySeconds": str(ray_service(overlay)["rayClusterDeletionDelaySeconds"]),
            }
        assert {label: cells[column] for label, cells in stated.items() if cells[column]} == found
