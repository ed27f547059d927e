"""What no schema says: the manifests agree with each other, with the service, with Ray and with what KubeRay makes of them."""

import math
import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.main import get_command

from service import settings
from service.deployment import commands, fetching
from service.deployment.flags import CLUSTER_FLAGS, cluster_flags, shutdown_s
from service.deployment.haproxy import KEEP_ALIVE_S
from service.dialects import health
from tests.deploy.rendered import (
    DEPLOY,
    Manifest,
    bytes_of,
    chosen,
    deployments,
    environment,
    groups,
    installed,
    manifests,
    named,
    of_kind,
    ours,
    pods,
    ports,
    ray_service,
    selected,
    serving,
)
from tests.deploy.test_chart import INSTALLS, RAY

pytestmark = pytest.mark.live

RAY_PORTS = {"serve": 8000, "metrics": 8080}  # of KubeRay and Ray, where nothing else is said
HAPROXY_METRICS_PORT = 9101  # RAY_SERVE_HAPROXY_METRICS_PORT
KIND_CPU, KIND_MEMORY = 4, 8 * 2**30  # the laptop
KIND_SYSTEM_CPU, KIND_SYSTEM_MEMORY = 0.95, 290 * 2**20  # requested by what kind itself runs on its one node
DEREGISTERED_S = 15  # until every node knows that a pod takes no new connections
STOPPING_S = 20  # for Ray to end after the last request
CLUSTERS = [name for name, values in INSTALLS.items() if values.get("rayService", {}).get("enabled")]
SCALED = [name for name in CLUSTERS if name != "ray, fixed"]
HA = ["ha", "ray, gpu, ha"]
RUNBOOK = (DEPLOY / "README.md").read_text()

clusters = pytest.mark.parametrize("install", CLUSTERS)
installs = pytest.mark.parametrize("install", INSTALLS)
kinds = pytest.mark.parametrize("kind", [{}, RAY], ids=["plain", "ray"])


def made(install: str) -> list[Manifest]:
    return installed(INSTALLS[install])


# Pods ------------------------------------------------------------------------------------------------------------------------------------


@installs
def test_keys_are_only_ever_secrets(install: str) -> None:
    """No key in a ConfigMap or a manifest: a pod has them as a file of its Secret, and without that does not start."""
    found = made(install)
    assert not of_kind(found, "Secret")
    for each in of_kind(found, "ConfigMap"):
        assert not [name for name in each["data"] if name.endswith(("_KEY", "_KEYS", "_TOKEN", "_PASSWORD"))]
    for pod in ours(found):
        file = environment(found, pod)["ATTNSERVE_API_KEYS_FILE"]
        mounts = [each for each in pod.container["volumeMounts"] if each["name"] == "keys"]
        volumes = [each for each in pod.spec["volumes"] if each["name"] == "keys"]
        if install in ("one", "kind"):
            assert (file, mounts, volumes) == ("", [], [])
            continue
        assert mounts == [{"name": "keys", "mountPath": str(Path(file).parent), "readOnly": True}], "no subPath: it would not change"
        assert volumes == [{"name": "keys", "secret": {"secretName": "attnserve-keys", "defaultMode": 0o440}}], (
            "uid 1000 reads it by fsGroup"
        )
        assert f"create secret generic attnserve-keys --from-file={Path(file).name}\n" in RUNBOOK


@clusters
def test_head_and_workers_have_the_same_environment(install: str) -> None:
    """Flags of Ray Serve are read in every process: a node with others behaves otherwise."""
    found = made(install)
    head, *workers = ours(found)
    for part in ("image", "env", "envFrom"):
        assert all(head.container.get(part) == worker.container.get(part) for worker in workers)
    known = environment(found, head)
    timeout_s = float(known["ATTNSERVE_REQUEST_TIMEOUT_S"])
    needed = {name: str(value) for name, value in cluster_flags(settings.Settings(request_timeout_s=timeout_s)).items()}
    binary = "RAY_SERVE_HAPROXY_BINARY_PATH"
    needed[binary] = f"/opt/attnserve/bin/{Path(needed[binary]).name}"  # where the image has it
    assert CLUSTER_FLAGS.keys() < needed.keys()
    assert known.items() >= needed.items()


@installs
def test_pods(install: str) -> None:
    """What a pod names is there, or the runbook has people make it. It has no rights, but for the token of the autoscaler, which changes
    the number of workers. Volumes are bounded and fit the disk; memory is never promised twice, and CPUs are whole: the service makes a
    thread for each."""
    found = [*made(install), *manifests("load")]
    assert not of_kind(found, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    there = {(each["kind"], each["metadata"]["name"]) for each in found}
    assert all(name.startswith("attnserve") and len(name) <= 63 for _, name in there)
    assert not [each for each in found if "namespace" in each["metadata"]], "`kubectl -n` says where"
    for pod in pods(found):
        asks = pod.role == "head" and install in SCALED
        container, volumes = pod.container, pod.spec.get("volumes", [])
        assert pod.spec.get("serviceAccountName", "attnserve") == ("attnserve-head" if asks else "attnserve")
        assert ("ServiceAccount", pod.spec.get("serviceAccountName", "attnserve")) in there
        for source in container.get("envFrom", ()):
            if "configMapRef" in source:
                assert ("ConfigMap", source["configMapRef"]["name"]) in there
        assert pod.spec["automountServiceAccountToken"] is False
        tokens = {each["name"] for each in volumes if "projected" in each}
        assert len(tokens) == asks
        assert not tokens & {mount["name"] for mount in container["volumeMounts"]}
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        rights = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        for each in (container, *pod.spec.get("initContainers", ())):
            assert each["securityContext"] == rights
            assert re.search(r"@sha256:[0-9a-f]{64}$|:(?!latest)[^/:]+$", each["image"])
        resources = container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        empty = [each["emptyDir"] for each in volumes if "emptyDir" in each]
        in_memory = [bytes_of(each["sizeLimit"]) for each in empty if each.get("medium") == "Memory"]
        assert sum(in_memory) < bytes_of(resources["limits"]["memory"]) / 4  # it counts as the pod's memory
        if pod in ours(found):
            assert resources["requests"]["cpu"] == resources["limits"]["cpu"] == str(int(resources["limits"]["cpu"]))
            assert container["image"].endswith("-gpu" if "gpu" in INSTALLS[install] else "-cpu") or "@" in container["image"]
            on_disk = sum(bytes_of(each["sizeLimit"]) for each in empty if "medium" not in each)
            assert on_disk <= bytes_of(resources["limits"]["ephemeral-storage"]), "the pod would be evicted"


def test_kind_fits_a_laptop() -> None:
    """4 CPUs and 8 GiB hold all pods beside kind's own, also while they are updated, and no kind of an operator is needed."""
    found = made("kind")
    assert {each["apiVersion"] for each in found} <= {"v1", "apps/v1", "networking.k8s.io/v1"}
    (deployment,) = of_kind(found, "Deployment")
    assert (deployment["spec"]["strategy"], deployment["spec"]["replicas"]) == ({"type": "Recreate"}, 1)
    (asked,) = [pod.container["resources"]["requests"] for pod in pods(found)]
    assert int(asked["cpu"]) + KIND_SYSTEM_CPU < KIND_CPU
    assert bytes_of(asked["memory"]) + KIND_SYSTEM_MEMORY < KIND_MEMORY / 2  # the rest is the laptop's


# Ports, probes, networks, budgets --------------------------------------------------------------------------------------------------------


def test_ports_and_probes() -> None:
    """Named as KubeRay looks for them, with the numbers that Ray, HAProxy and the service listen on. A few seconds without a CPU do not
    take every worker out of the Service at once."""
    found = made("cpu")
    config = yaml.safe_load(ray_service(found)["serveConfigV2"])
    assert config["http_options"] == {"host": "0.0.0.0", "port": RAY_PORTS["serve"], "keep_alive_timeout_s": KEEP_ALIVE_S}
    for pod in ours(found):
        assert ports(pod).items() >= RAY_PORTS.items()
    for pod in serving(found):
        assert ports(pod)["haproxy"] == HAPROXY_METRICS_PORT
        probe = pod.container["readinessProbe"]
        assert probe["httpGet"] == {"path": "/-/healthz", "port": "serve"}  # as test_the_rendered_cluster_answers asks it
        assert probe["timeoutSeconds"] >= 5
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 20
    found = made("plain")
    (pod,) = ours(found)
    assert ports(pod) == {"http": settings.Settings().port}
    (service,) = of_kind(found, "Service")
    assert service["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]
    assert chosen({"matchLabels": service["spec"]["selector"]}, found) == [pod]
    routes = {route.path for route in health.router.routes}  # type: ignore[attr-defined]
    for each in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert pod.container[each]["httpGet"]["path"] in routes
        assert pod.container[each]["httpGet"]["port"] == "http"
    assert pod.container["livenessProbe"]["httpGet"]["path"] == "/health/live"  # readiness fails while a queue is full or a start fails


@pytest.mark.parametrize("install", ["plain", "cpu", "gpu"])
def test_targets_have_the_labels_that_rules_ask_for(install: str) -> None:
    """job="attnserve"; the head told from workers; and no two targets of a pod with all labels in common, which Prometheus would mix up."""
    found = made(install)
    (monitor,) = of_kind(found, "PodMonitor", "ServiceMonitor")
    if monitor["kind"] == "ServiceMonitor":
        labels, endpoints = [each["metadata"]["labels"] for each in of_kind(found, "Service")], monitor["spec"]["endpoints"]
        assert endpoints[0]["path"] in {route.path for route in health.router.routes}  # type: ignore[attr-defined]
    else:
        targets = chosen(monitor["spec"]["selector"], found)
        labels, endpoints = [pod.labels for pod in targets], monitor["spec"]["podMetricsEndpoints"]
        assert "app.kubernetes.io/component" in monitor["spec"]["podTargetLabels"]
        assert {each["app.kubernetes.io/component"] for each in labels} == {"head", "worker"}
        assert all(any(each["port"] in ports(pod) for pod in targets) for each in endpoints)
        scrape = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yaml").read_text())
        (by_file,) = [each["metric_relabel_configs"] for each in scrape["scrape_configs"] if "metric_relabel_configs" in each]
        spelled = {"source_labels": "sourceLabels", "target_label": "targetLabel"}
        assert endpoints[0]["metricRelabelings"] == [{spelled.get(key, key): value for key, value in each.items()} for each in by_file]
    assert all(selected(monitor["spec"]["selector"], each) for each in labels)
    assert {each[monitor["spec"]["jobLabel"]] for each in labels} == {"attnserve"}
    seen = [
        {"endpoint": each["port"]} | {one["targetLabel"]: one["replacement"] for one in each.get("relabelings", ())} for each in endpoints
    ]
    assert all(one not in seen[:at] for at, one in enumerate(seen))


@installs
def test_budgets(install: str) -> None:
    """One pod of each group at a time may go, and the drain of a node is never blocked for good: one pod has no budget. A RayCluster has no
    scale from which Kubernetes could take the number that should be there, so its budgets have the least number."""
    found = made(install)
    budgets = [each["spec"] for each in of_kind(found, "PodDisruptionBudget") if each["metadata"]["name"] != "attnserve-state"]
    least = {"attnserve": INSTALLS[install].get("scaling", {}).get("min", 2)}
    if install in CLUSTERS:
        least = {each["groupName"]: each["minReplicas"] for each in groups(found)}
    covered = {pod.role: budget for budget in budgets for pod in chosen(budget["selector"], found)}
    assert covered.keys() == {role for role, number in least.items() if number > 1}
    for role, budget in covered.items():
        bounds = {name: value for name, value in budget.items() if name != "selector"}
        assert bounds == ({"minAvailable": least[role] - 1} if install in CLUSTERS else {"maxUnavailable": 1})


@installs
def test_network_policies(install: str) -> None:
    """Every pod is behind a policy; every port that Prometheus is to scrape is open to it, and Ray's own are open to no namespace. DNS
    finds OpenShift's resolver and those of nodes and clouds too. What else leads outside has a policy of its own."""
    found = made(install)
    policies = of_kind(found, "NetworkPolicy")
    for pod in pods(found):
        assert any(pod in chosen(each["spec"]["podSelector"], found) for each in policies)
    for rule in (rule for policy in policies for rule in policy["spec"].get("ingress", ())):
        foreign = [peer for peer in rule["from"] if "namespaceSelector" in peer]
        opened = {port["port"] for port in rule.get("ports", ())}
        assert not foreign or (opened and not opened & {6379, 10001, 52365})
        if foreign == [{"namespaceSelector": {"matchLabels": {"attnserve/access": "monitoring"}}}]:
            assert opened == {RAY_PORTS["serve"], RAY_PORTS["metrics"], HAPROXY_METRICS_PORT}
    inside = [each for each in policies if each["metadata"]["name"] in ("attnserve", "attnserve-redis")]
    rules = [rule for each in inside for rule in each["spec"].get("egress", ())]
    (names,) = [rule for rule in rules if any(peer.keys() != {"podSelector"} for peer in rule["to"])]
    assert {(port["port"], port["protocol"]) for port in names["ports"]} == {(port, way) for port in (53, 5353) for way in ("UDP", "TCP")}
    (namespaces,) = [peer["namespaceSelector"] for peer in names["to"] if "namespaceSelector" in peer]
    assert all(selected(namespaces, {"kubernetes.io/metadata.name": each}) for each in ("kube-system", "openshift-dns"))
    blocks = [ip_network(peer["ipBlock"]["cidr"]) for peer in names["to"] if "ipBlock" in peer]
    for resolver in ("169.254.20.10", "169.254.169.253", "169.254.169.254", "168.63.129.16"):
        assert any(ip_address(resolver) in block for block in blocks)
    without = installed({**INSTALLS[install], "networkPolicies": False})
    assert not of_kind(without, "NetworkPolicy")


# What only some releases have ------------------------------------------------------------------------------------------------------------


def way_out(found: list[Manifest], name: str) -> dict[str, Any]:
    """The one egress rule of a policy of all pods of the service."""
    policy = named(found, "NetworkPolicy", f"attnserve-{name}")["spec"]
    assert chosen(policy["podSelector"], found) == ours(found)
    (rule,) = policy["egress"]
    return dict(rule)


@kinds
def test_traces(kind: dict[str, Any]) -> None:
    """Every pod of the service has the collector's address, and may connect to its port and no other."""
    found = installed({**kind, **INSTALLS["traces"]})
    for pod in ours(found):
        address = urlsplit(environment(found, pod)["ATTNSERVE_OTLP_ENDPOINT"])
        assert [port["port"] for port in way_out(found, "traces")["ports"]] == [address.port]


@kinds
@pytest.mark.parametrize(
    ("models", "source"),
    [
        ({"claim": "mine"}, {"persistentVolumeClaim": {"claimName": "mine", "readOnly": True}}),
        ({"image": "registry.example/bundles"}, {"image": {"reference": "registry.example/bundles", "pullPolicy": "IfNotPresent"}}),
    ],
    ids=["claim", "image"],
)
def test_a_volume_of_models(kind: dict[str, Any], models: dict[str, Any], source: dict[str, Any]) -> None:
    """Every pod of the service reads it at /models, the head too: Serve may read there which kinds of bundles there are."""
    for pod in ours(installed({**kind, "models": models})):
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod.container["volumeMounts"]
        assert {"name": "models", **source} in pod.spec["volumes"]


@kinds
def test_fetch(kind: dict[str, Any]) -> None:
    """Every pod fetches the bundles before it starts, with the rights of the service and a way out to HTTPS; the service reads them."""
    urls = ["s3://mine/minilm#sha256:" + "0" * 64, "decoder=https://mine.example:8443/1"]
    found = installed({**kind, "models": {"fetch": {"urls": urls, "secret": "mine", "size": "9Gi", "ports": [443, 8443]}}})
    assert [each["port"] for each in way_out(found, "fetch")["ports"]] == [443, 8443]
    assert "create secret generic attnserve-fetch " in RUNBOOK
    for pod in ours(found):
        (step,) = pod.spec["initContainers"]
        assert [step[part] for part in ("image", "imagePullPolicy")] == [pod.container[part] for part in ("image", "imagePullPolicy")]
        assert step["args"] == ["fetch", "--to", "/models", "--max-gib", "7"]
        assert set(step["args"][1::2]) <= {option for each in get_command(commands.app).commands["fetch"].params for option in each.opts}
        assert [fetching.parse(url).name for url in environment(found, pod, step)["BUNDLE_URLS"].split()] == ["minilm", "decoder"]
        assert {"secretRef": {"name": "mine", "optional": True}} in step["envFrom"]
        assert step["volumeMounts"] == [{"name": "models", "mountPath": "/models"}]
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod.container["volumeMounts"]
        assert {"name": "models", "emptyDir": {"sizeLimit": "9Gi"}} in pod.spec["volumes"]


def test_states_on_a_volume() -> None:
    """One pod at a time has the volume, also while it is replaced."""
    found = made("states")
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
def test_states_in_redis(install: str, port: int, to: dict[str, Any]) -> None:
    """Every pod has the address and the password, from a Secret, and may connect."""
    found, given = made(install), INSTALLS[install]["states"]["redis"]
    assert way_out(found, "states") == {"to": [to], "ports": [{"port": port, "protocol": "TCP"}]}
    for pod in ours(found):
        assert environment(found, pod)["ATTNSERVE_STATES"] == given["url"]
        secrets = [each["secretRef"] for each in pod.container["envFrom"] if "secretRef" in each]
        assert secrets == ([{"name": given["secret"]}] if given["secret"] else [])


def test_load_test_reaches_the_service() -> None:
    """Its address is a Service that there is: KubeRay names its own after the RayService."""
    found = manifests("load")
    (job,) = pods(found)
    url = {each["name"]: each.get("value") for each in job.container["env"]}["URL"]
    (service,) = of_kind(made("cpu"), "RayService")
    assert url == f"http://{service['metadata']['name']}-serve-svc:{RAY_PORTS['serve']}"
    (policy,) = [each["spec"] for each in of_kind(found, "NetworkPolicy")]
    assert selected(policy["ingress"][0]["from"][0]["podSelector"], job.labels)
    assert all(selected(policy["podSelector"], pod.labels) for pod in serving(made("cpu")))


@pytest.mark.parametrize("install", HA)
def test_ha(install: str) -> None:
    """Redis is where the GCS looks for it, with one password, and workers answer on without a head for longer than KubeRay has it. Head and
    Redis are evicted one after the other."""
    found = made(install)
    options = ray_service(found)["rayClusterConfig"]["gcsFaultToleranceOptions"]
    (service,) = of_kind(found, "Service")
    assert options["redisAddress"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    (redis,) = chosen({"matchLabels": service["spec"]["selector"]}, found)
    assert redis.role == "attnserve-redis"
    assert redis.container["env"][0]["valueFrom"] == options["redisPassword"]["valueFrom"]
    (claim,) = of_kind(found, "StatefulSet")[0]["spec"]["volumeClaimTemplates"]
    assert redis.container["volumeMounts"] == [{"name": claim["metadata"]["name"], "mountPath": "/data"}]
    assert "--dir /data --appendonly yes --appendfsync always " in redis.container["args"][0]
    assert way_out(found, "to-redis")["ports"] == [{"port": 6379, "protocol": "TCP"}]
    for pod in ours(found):
        # KubeRay sets 600 unless it finds the name here; it does not look into envFrom.
        assert pod.container["env"] == [{"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "3600"}]
    budget = named(found, "PodDisruptionBudget", "attnserve-state")["spec"]
    assert sorted(pod.role for pod in chosen(budget["selector"], found)) == ["attnserve-redis", "head"]
    assert (budget["minAvailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    elsewhere = installed(
        {"rayService": {**INSTALLS[install]["rayService"], "redis": {"address": "cache.example:6380", "cidr": "10.1.0.0/16"}}}
    )
    assert ray_service(elsewhere)["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"] == "cache.example:6380"
    assert way_out(elsewhere, "to-redis") == {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 6380, "protocol": "TCP"}]}
    assert not of_kind(elsewhere, "StatefulSet")


@clusters
def test_pods_spread(install: str) -> None:
    """Over nodes: the workers of a group among themselves, with `ha` without exception, and head and Redis away from them. Kubernetes takes
    a pair of key and `whenUnsatisfiable` once."""
    found = made(install)
    for pod in pods(found):
        spread = pod.spec["topologySpreadConstraints"]
        pairs = [(each["topologyKey"], each["whenUnsatisfiable"]) for each in spread]
        assert len(pairs) == len(set(pairs))
        strict = pod in serving(found) and install in HA
        assert ("kubernetes.io/hostname", "DoNotSchedule" if strict else "ScheduleAnyway") in pairs
        # Without it the nodes that are there share the workers, be it a single one, and none is added.
        assert [each["minDomains"] for each in spread if each["whenUnsatisfiable"] == "DoNotSchedule"] == ([3] if strict else [])
        for each in spread:
            assert chosen(each["labelSelector"], found) == ([pod] if pod in serving(found) else list(pods(found)))


def test_an_upgrade_in_steps() -> None:
    assert ray_service(made("ray, gateway"))["upgradeStrategy"] == {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": {"gatewayClassName": "istio", "maxSurgePercent": 50, "stepSizePercent": 10, "intervalSeconds": 60},
    }
    assert ray_service(made("cpu"))["upgradeStrategy"] == {"type": "NewCluster"}


# Drain times ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_s", [300, 900])
def test_drain_times(request_s: int) -> None:
    """Each follows from the longest request, which everything that could end it waits for: the end of a replica, the drain of its node, the
    pod's own end after its sleep, the old cluster's; HAProxy's old process may have a request come after an idle connection's 620 s."""
    found = installed({**RAY, "requestTimeoutSeconds": request_s})
    loaded, cluster = settings.Settings(request_timeout_s=request_s), ray_service(found)
    assert {each["graceful_shutdown_timeout_s"] for each in deployments(found).values()} == {shutdown_s(loaded)}
    for pod in ours(found):
        known = environment(found, pod)
        assert known.items() >= {name: str(value) for name, value in cluster_flags(loaded).items() if name not in CLUSTER_FLAGS}.items()
        drain_s, end_s = int(known["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]), pod.spec["terminationGracePeriodSeconds"]
        assert request_s < shutdown_s(loaded) < drain_s < DEREGISTERED_S + drain_s + STOPPING_S <= end_s < math.inf
        assert end_s <= cluster["rayClusterDeletionDelaySeconds"]  # the head's too: it is there until workers have drained
        assert "ATTNSERVE_DRAIN_TIMEOUT_S" not in known  # Serve drains replicas here, and does not ask for it
    plain = installed({"requestTimeoutSeconds": request_s})
    (pod,) = ours(plain)
    drain_s = int(environment(plain, pod)["ATTNSERVE_DRAIN_TIMEOUT_S"])
    assert request_s < drain_s < DEREGISTERED_S + drain_s + STOPPING_S <= pod.spec["terminationGracePeriodSeconds"]
    for each in (*serving(found), pod):
        assert each.container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(DEREGISTERED_S)]


def test_runbook_has_these_drain_times() -> None:
    """The table of deploy/README.md, column for column."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in RUNBOOK.splitlines() if "|" in line]
    head = next(row for row in rows if row[1:] == ["cpu, gpu", "ha", "plain"])
    stated = {label.partition("`")[2].partition("`")[0] or label: cells for label, *cells in rows[rows.index(head) + 2 :][:8]}
    for column, install in enumerate(("cpu", "ha", "plain")):
        found = made(install)
        pod = serving(found)[0]
        known = environment(found, pod)
        expected = {
            "ATTNSERVE_REQUEST_TIMEOUT_S": known["ATTNSERVE_REQUEST_TIMEOUT_S"],
            "sleep of a pod before SIGTERM": str(DEREGISTERED_S),
            "terminationGracePeriodSeconds": str(pod.spec["terminationGracePeriodSeconds"]),
        }
        if install == "plain":
            expected["ATTNSERVE_DRAIN_TIMEOUT_S"] = known["ATTNSERVE_DRAIN_TIMEOUT_S"]
        else:
            expected |= {
                "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": known["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"],
                "graceful_shutdown_timeout_s": str(deployments(found)["gateway"]["graceful_shutdown_timeout_s"]),
                "..._HARD_STOP_AFTER_S": known["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"],
                "rayClusterDeletionDelaySeconds": str(ray_service(found)["rayClusterDeletionDelaySeconds"]),
            }
        assert {label: cells[column] for label, cells in stated.items() if cells[column]} == expected
