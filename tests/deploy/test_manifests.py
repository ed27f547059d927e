"""What no schema says: the manifests agree with each other, with the service and with what KubeRay makes of them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from service import settings
from service.deployment import scaling
from service.deployment.gpus import replica_gpus
from service.deployment.running import CLUSTER_FLAGS, KEEP_ALIVE_S, cluster_flags
from service.metrics import Metrics
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

KUBERAY_LONGEST_NAME = 47  # of a RayService: it makes names of 63 out of it
RAY_PORTS = {"serve": 8000, "metrics": 8080}  # of KubeRay and Ray, where nothing else is said
HAPROXY = "RAY_SERVE_HAPROXY_BINARY_PATH"
HAPROXY_METRICS_PORT = 9101  # RAY_SERVE_HAPROXY_METRICS_PORT
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
        assert loaded.provider == ("cuda" if overlay == "overlays/gpu" else "cpu")


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


# Names, images, rights -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", ALL)
def test_names(overlay: str) -> None:
    for each in manifests(overlay):
        name = each["metadata"]["name"]
        assert name.startswith("attnserve")
        assert len(name) <= (KUBERAY_LONGEST_NAME if each["kind"] == "RayService" else 63)
        assert "namespace" not in each["metadata"]  # whoever applies it says where


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
            assert tag.endswith("-gpu" if overlay == "overlays/gpu" else "-cpu")


def autoscaled(overlay: str) -> bool:
    """Ray's autoscaler runs beside the head."""
    return overlay in RAY_OVERLAYS and "enableInTreeAutoscaling" in ray_service(overlay)["rayClusterConfig"]


def test_pods_have_no_rights() -> None:
    """But the head whose autoscaler changes the number of workers: KubeRay gives a Role for that to the account that it names."""
    for overlay, pod in all_pods():
        asks = autoscaled(overlay) and pod.role == "head"
        assert pod.spec["automountServiceAccountToken"] is asks
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


@pytest.mark.parametrize("overlay", ["overlays/cpu", "overlays/gpu"])
def test_pools_and_workers_follow_the_load(overlay: str) -> None:
    """By the policy and the targets of the service, and with an autoscaler that may ask for workers and reach the Kubernetes API."""
    targets = {"gateway": scaling.GATEWAY_TARGET, "encoder": scaling.ENCODER_TARGET, "generator": scaling.GENERATOR_TARGET}
    for name, deployment in deployments(overlay).items():
        assert deployment["autoscaling_config"] == scaling.autoscaling(2, 8, targets[name])
    assert autoscaled(overlay)
    head, worker = ours(overlay)
    assert head.spec["restartPolicy"] == worker.spec["restartPolicy"] == "Never"
    (policy,) = [each for each in of_kind(manifests(overlay), "NetworkPolicy") if each["metadata"]["name"] == "attnserve-autoscaler"]
    assert [pod.role for pod in chosen(policy["spec"]["podSelector"], manifests(overlay))] == ["head"]


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
        assert serve_config(overlay)["http_options"] == {"host": "0.0.0.0", "port": RAY_PORTS["serve"]}
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


def test_our_series_have_one_name() -> None:
    """The PodMonitor renames as deploy/prometheus/scrape.yaml does, in the spelling of its API."""
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yaml").read_text())
    (by_file,) = [each["metric_relabel_configs"] for each in scrape["scrape_configs"] if "metric_relabel_configs" in each]
    (monitor,) = of_kind(manifests("base"), "PodMonitor")
    spelled = {"source_labels": "sourceLabels", "target_label": "targetLabel"}
    renamed = [{spelled.get(name, name): value for name, value in each.items()} for each in by_file]
    assert monitor["spec"]["podMetricsEndpoints"][0]["metricRelabelings"] == renamed


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_budget(overlay: str) -> None:
    """One pod at a time may go, and the drain of a node is never blocked for good."""
    (budget,) = of_kind(manifests(overlay), "PodDisruptionBudget")
    assert [pod.role for pod in chosen(budget["spec"]["selector"], manifests(overlay))] == [serving(overlay).role]
    if overlay == "overlays/plain":
        replicas = of_kind(manifests(overlay), "HorizontalPodAutoscaler")[0]["spec"]["minReplicas"]
    else:
        replicas = ray_service(overlay)["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"]
    assert budget["spec"]["minAvailable"] == replicas - 1


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
    """The one rule that leads to more than pods of this namespace is that of DNS, which also finds the cache of a node; but for the head's
    to the Kubernetes API, where there is an autoscaler."""
    policies = [each for each in of_kind(manifests(overlay), "NetworkPolicy") if each["metadata"]["name"] != "attnserve-autoscaler"]
    rules = [rule for each in policies for rule in each["spec"].get("egress", ())]
    (names,) = [rule for rule in rules if any(peer.keys() != {"podSelector"} for peer in rule["to"])]
    assert {port["port"] for port in names["ports"]} == {53}
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in names["to"]


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


def test_ha() -> None:
    """Redis is where the GCS looks for it, with one password; workers spread over nodes; more of them than in `cpu`."""
    spec = ray_service("overlays/ha")
    options = spec["rayClusterConfig"]["gcsFaultToleranceOptions"]
    (redis,) = of_kind(manifests("overlays/ha"), "StatefulSet")
    (service,) = of_kind(manifests("overlays/ha"), "Service")
    assert options["redisAddress"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    container = redis["spec"]["template"]["spec"]["containers"][0]
    assert container["env"][0]["valueFrom"] == options["redisPassword"]["valueFrom"]
    spread = serving("overlays/ha").spec["topologySpreadConstraints"]
    assert ("kubernetes.io/hostname", "DoNotSchedule") in [(each["topologyKey"], each["whenUnsatisfiable"]) for each in spread]
    assert all(each["labelSelector"]["matchLabels"].items() <= serving("overlays/ha").labels.items() for each in spread)
    assert spec["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] == 3


@pytest.mark.parametrize("overlay", RAY_OVERLAYS)
def test_workers_spread(overlay: str) -> None:
    spread = serving(overlay).spec["topologySpreadConstraints"]
    assert "kubernetes.io/hostname" in [each["topologyKey"] for each in spread]
    assert all(each["labelSelector"]["matchLabels"].items() <= serving(overlay).labels.items() for each in spread)


# Drain times ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", RAY_OVERLAYS)
def test_drain_times_of_ray(overlay: str) -> None:
    """request < end of a replica < drain of its node; HAProxy's old process may have a request come after an idle connection's 90 s. The
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
