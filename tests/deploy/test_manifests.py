"""What no schema says: the manifests agree with each other, with the service, with Ray and with what KubeRay makes of them."""

import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

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
        if asks:
            assert ray_service(found)["rayClusterConfig"]["autoscalerOptions"]["securityContext"] == rights
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
    # Readiness fails while a queue is full or a start fails, which may take 300 s: no reason for a restart.
    for each, path, least_s in (("startup", "ready", 300), ("readiness", "ready", 0), ("liveness", "live", 60)):
        probe = pod.container[f"{each}Probe"]
        assert probe["httpGet"] == {"path": f"/health/{path}", "port": "http"}
        assert probe["httpGet"]["path"] in routes
        assert probe["periodSeconds"] * probe["failureThreshold"] >= least_s


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
    assert install != "ha" or not of_kind(installed({**INSTALLS["ha"], "networkPolicies": False}), "NetworkPolicy")


# What only some releases have ------------------------------------------------------------------------------------------------------------


def way_out(found: list[Manifest], name: str) -> dict[str, Any]:
    """The one egress rule of a policy of all pods of the service."""
    policy = named(found, "NetworkPolicy", f"attnserve-{name}")["spec"]
    assert chosen(policy["podSelector"], found) == ours(found)
    (rule,) = policy["egress"]
    return {"to": rule["to"], "ports": [port["port"] for port in rule["ports"]]}


def access(to: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"attnserve/access": to}}}


@kinds
@pytest.mark.parametrize(
    ("values", "variables", "opened"),
    [
        (INSTALLS["traces"], {"OTLP_ENDPOINT": "http://otel-collector.monitoring:4318"}, ("traces", access("monitoring"), 4318)),
        (INSTALLS["redis"], {"STATES": "rediss://store@cache.example:6380"}, ("states", {"ipBlock": {"cidr": "10.1.0.0/16"}}, 6380)),
        (INSTALLS["ray, redis"], {"STATES": "redis://cache.example"}, ("states", access("states"), 6379)),
    ],
    ids=["traces", "states", "states without password"],
)
def test_addresses(
    kind: dict[str, Any], values: dict[str, Any], variables: dict[str, str], opened: tuple[str, dict[str, Any], int]
) -> None:
    """Every pod of the service has an address, may connect to its port and no other, and has a password from a Secret if there is one."""
    found = installed({**values, "rayService": {}, **kind})
    name, to, port = opened
    assert way_out(found, name) == {"to": [to], "ports": [port]}
    for pod in ours(found):
        known = environment(found, pod)
        assert {name: known[f"ATTNSERVE_{name}"] for name in variables} == variables
        secrets = [each["secretRef"] for each in pod.container["envFrom"] if "secretRef" in each]
        assert secrets == ([{"name": "mine"}] if values is INSTALLS["redis"] else [])


@pytest.mark.parametrize(
    ("values", "name", "source"),
    [
        ({"models": {"claim": "mine"}}, "models", {"persistentVolumeClaim": {"claimName": "mine", "readOnly": True}}),
        ({**RAY, "models": {"claim": "mine"}}, "models", {"persistentVolumeClaim": {"claimName": "mine", "readOnly": True}}),
        (INSTALLS["oci"], "models", {"image": {"reference": INSTALLS["oci"]["models"]["image"], "pullPolicy": "IfNotPresent"}}),
        (INSTALLS["states"], "states", {"persistentVolumeClaim": {"claimName": "mine"}}),
    ],
    ids=["claim", "ray, claim", "image", "states"],
)
def test_volumes(values: dict[str, Any], name: str, source: dict[str, Any]) -> None:
    """Every pod of the service reads models, the head too: Serve may read there which kinds of bundles there are. One pod at a time has the
    volume of states, also while it is replaced."""
    found = installed(values)
    mount = {"name": name, "mountPath": f"/{name}"} | ({"readOnly": True} if name == "models" else {})
    for pod in ours(found):
        assert mount in pod.container["volumeMounts"]
        assert {"name": name, **source} in pod.spec["volumes"]
        assert environment(found, pod)["ATTNSERVE_STATES"] == ("/states" if name == "states" else "/tmp/states")
    assert name == "models" or of_kind(found, "Deployment")[0]["spec"]["strategy"] == {"type": "Recreate"}


@kinds
def test_fetch(kind: dict[str, Any]) -> None:
    """Every pod fetches the bundles before it starts, with the rights of the service and a way out to HTTPS; the service reads them."""
    urls = ["s3://mine/minilm#sha256:" + "0" * 64, "decoder=https://mine.example:8443/1"]
    found = installed({**kind, "models": {"fetch": {"urls": urls, "secret": "mine", "size": "9Gi", "ports": [443, 8443]}}})
    assert way_out(found, "fetch")["ports"] == [443, 8443]
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
    assert way_out(found, "to-redis")["ports"] == [6379]
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
    assert way_out(elsewhere, "to-redis") == {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [6380]}
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


# Drain times ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_s", [300, 900])
def test_drain_times(request_s: int) -> None:
    """Each follows from the longest request, which everything that could end it waits for, as the table of deploy/README.md says: the end
    of a replica, the drain of its node, the pod's own end after its sleep, the old cluster's; HAProxy's old process may have a request come
    after an idle connection's 620 s."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in RUNBOOK.splitlines() if line.startswith("|")]
    first = next(at for at, row in enumerate(rows) if row[0] == "seconds after the longest request") + 2
    for column, kind in ((1, RAY), (2, {})):
        found, loaded = installed({**kind, "requestTimeoutSeconds": request_s}), settings.Settings(request_timeout_s=request_s)
        stated = {row[0].split("`")[1]: request_s + int(row[column]) for row in rows[first : first + 6] if row[column]}
        for pod in ours(found):
            times = {"terminationGracePeriodSeconds": pod.spec["terminationGracePeriodSeconds"]}
            drained = "ATTNSERVE_DRAIN_TIMEOUT_S"  # of a plain pod: on a cluster Serve drains replicas, and does not ask for it
            if kind:
                times |= {name: int(str(value)) for name, value in cluster_flags(loaded).items() if name not in CLUSTER_FLAGS}
                times["rayClusterDeletionDelaySeconds"] = ray_service(found)["rayClusterDeletionDelaySeconds"]
                (times["graceful_shutdown_timeout_s"],) = {each["graceful_shutdown_timeout_s"] for each in deployments(found).values()}
                assert (
                    request_s < times["graceful_shutdown_timeout_s"] == shutdown_s(loaded) < times["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
                )
                assert times["terminationGracePeriodSeconds"] <= times["rayClusterDeletionDelaySeconds"]
                drained = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
            times[drained] = int(environment(found, pod)[drained])
            assert times == stated
            assert request_s < times[drained] < DEREGISTERED_S + times[drained] + STOPPING_S <= times["terminationGracePeriodSeconds"]
            if pod.role != "head":
                assert pod.container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(DEREGISTERED_S)]
