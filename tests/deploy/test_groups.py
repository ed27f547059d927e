"""Groups of workers, the pools whose replicas they have, and how both follow the load."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay import node_provider

# Private, but what the autoscaler knows of a worker that it has not started yet: it must be what the worker has.
from ray.autoscaler._private.kuberay.autoscaling_config import _get_ray_resources_from_group_spec as resources_of

from service.deployment import scaling
from service.telemetry.metrics import Metrics
from tests.deploy.rendered import (
    DEPLOY,
    OVERLAYS,
    chosen,
    deployments,
    environment,
    groups,
    installed,
    named,
    of_kind,
    ours,
    ray_service,
    serving,
)
from tests.deploy.test_chart import INSTALLS, RAY
from tests.deploy.test_manifests import RUNBOOK, SCALED, clusters, made

pytestmark = pytest.mark.live

SMALLEST_GPU_GIB = 15  # what CUDA reports of a card sold as 16 GB with ECC
DRIVER_GIB = 1  # the driver's context and the libraries of one process, rounded up


@clusters
def test_each_pool_has_its_group_of_workers(install: str) -> None:
    """As Ray's autoscaler reads the groups: each replica finds its custom resource on the workers of one group alone, one of each of its
    pools fills a worker but for a CPU, and has the whole GPU with the others. Numbers of replicas and workers are the same."""
    found = made(install)
    nodes = {each["groupName"]: resources_of(each, False) for each in groups(found)}
    left = {name: {**node, "CPU": node["CPU"] - 1} for name, node in nodes.items()}  # for HAProxy and Ray's agents
    for name, deployment in deployments(found).items():
        options = deployment["ray_actor_options"]
        assert options["resources"] == {name: 1}
        (home,) = [group for group in groups(found) if name in nodes[group["groupName"]]]
        asked = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), name: 1}
        for resource, amount in asked.items():
            left[home["groupName"]][resource] = left[home["groupName"]].get(resource, 0) - amount
        bounds = deployment.get("autoscaling_config", {})
        least, most = (bounds["min_replicas"], bounds["max_replicas"]) if bounds else [deployment["num_replicas"]] * 2
        assert (least, least, most) == (home["replicas"], home["minReplicas"], home["maxReplicas"])
    assert {amount for node in left.values() for resource, amount in node.items() if resource != "memory"} == {0}
    head = ray_service(found)["rayClusterConfig"]["headGroupSpec"]
    assert resources_of(head, True)["CPU"] == 0
    assert not nodes.keys() & resources_of(head, True).keys()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (INSTALLS["cpu"], {"encoders": {"gateway": 1, "encoder": 3}, "generators": {"generator": 3}}),
        (INSTALLS["gpu"], {"workers": {"gateway": 1, "encoder": 3, "generator": 3}}),
        (INSTALLS["ray, encoders"], {"workers": {"gateway": 1, "encoder": 6}}),
        (INSTALLS["groups"], {"encoders": {"gateway": 1, "encoder": 10}, "generators": {"generator": 3}}),
    ],
    ids=["separate", "together", "encoders", "sized"],
)
def test_groups(values: dict[str, Any], expected: dict[str, dict[str, int]]) -> None:
    """Two groups or one, and the CPUs of each replica."""
    found = installed(values)
    cpus = {name: each["ray_actor_options"]["num_cpus"] for name, each in deployments(found).items()}
    homes = {each["groupName"]: resources_of(each, False) for each in groups(found)}
    assert {group: {name: cpus[name] for name in cpus if name in node} for group, node in homes.items()} == expected


def test_a_group_has_its_own_numbers_and_nodes() -> None:
    encoders, generators = groups(made("groups"))
    assert [(each["minReplicas"], each["maxReplicas"]) for each in (encoders, generators)] == [(2, 20), (3, 5)]
    pod = {each["groupName"]: each["template"]["spec"] for each in (encoders, generators)}
    assert (pod["encoders"]["nodeSelector"], pod["encoders"].get("tolerations")) == ({"size": "large"}, None)
    assert (pod["generators"].get("nodeSelector"), pod["generators"]["tolerations"][0]["key"]) == (None, "mine")
    budgets = {each["metadata"]["name"]: each["spec"]["minAvailable"] for each in of_kind(made("groups"), "PodDisruptionBudget")}
    assert budgets == {"attnserve-encoders": 1, "attnserve-generators": 2}


def test_scheduling_and_image() -> None:
    for values in (INSTALLS["scheduled"], {**INSTALLS["scheduled"], **RAY}):
        for pod in serving(installed(values)):
            assert pod.spec["nodeSelector"] == {"disk": "fast"}
            assert [each["key"] for each in pod.spec["tolerations"]] == ["nvidia.com/gpu", "mine"]
            assert pod.container["image"] == "registry.example/attnserve@sha256:" + "0" * 64
            assert pod.spec["imagePullSecrets"] == [{"name": "mine"}]
            assert pod.container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_bundles_fit_the_gpu() -> None:
    """Encoder and generator share a device: the bounds of all bundles and what the driver keeps for each process are below the smallest."""
    found = installed(OVERLAYS["gpu"])
    known = environment(found, serving(found)[0])
    processes = round(1 / deployments(found)["encoder"]["ray_actor_options"]["num_gpus"])
    bundles = known["ATTNSERVE_BUNDLES"].split(",")
    assert len(bundles) * float(known["ATTNSERVE_GPU_MEMORY_GIB"]) + processes * DRIVER_GIB <= SMALLEST_GPU_GIB


@pytest.mark.parametrize("install", SCALED)
def test_pools_and_workers_follow_the_load(install: str) -> None:
    """By the policy and the targets of the service. The autoscaler, which KubeRay makes beside the head, is restricted as our containers,
    has the token where Ray looks for it, a bounded volume where KubeRay looks for one, and reaches the Kubernetes API."""
    found = made(install)
    targets = {"gateway": scaling.GATEWAY_TARGET, "encoder": scaling.ENCODER_TARGET, "generator": scaling.GENERATOR_TARGET}
    for name, deployment in deployments(found).items():
        bounds = deployment["autoscaling_config"]
        assert bounds == scaling.autoscaling(bounds["min_replicas"], bounds["max_replicas"], targets[name])
    cluster = ray_service(found)["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"]
    head, options = ours(found)[0], cluster["autoscalerOptions"]
    assert options["version"] == "v2"  # KubeRay then sets restartPolicy, and refuses another than Never
    assert not [pod for pod in ours(found) if "restartPolicy" in pod.spec]
    assert options["securityContext"] == head.container["securityContext"]
    volumes = {each["name"]: each for each in head.spec["volumes"]}
    mounts = {each["mountPath"]: volumes[each["name"]] for each in options["volumeMounts"]}
    ((path, token),) = [(path, volume["projected"]) for path, volume in mounts.items() if "projected" in volume]
    files = {
        Path(path) / each["path"] for source in token["sources"] for each in source.get("configMap", {"items": source.values()})["items"]
    }
    assert {Path(node_provider.IN_CLUSTER_TOKEN_PATH), Path(node_provider.IN_CLUSTER_CA_CERT_PATH)} <= files
    assert "sizeLimit" in volumes["ray-logs"]["emptyDir"]  # KubeRay's RayLogVolumeName
    policy = named(found, "NetworkPolicy", "attnserve-autoscaler")
    assert chosen(policy["spec"]["podSelector"], found) == [head]


def test_runbook_changes_the_running_cluster() -> None:
    """KubeRay takes the number of workers from a RayService only for a new cluster, so the runbook patches the RayCluster of the one that
    runs: its spec is the RayService's `rayClusterConfig`."""
    (patch,) = re.findall(r"patch raycluster \$cluster --type=json -p '(.+)'", RUNBOOK)
    for operation in json.loads(patch):
        _, spec, *path = operation["path"].split("/")
        assert (operation["op"], spec) == ("replace", "spec")
        there: Any = ray_service(made("cpu"))["rayClusterConfig"]
        for part in path:
            there = there[int(part) if part.isdigit() else part]
        assert type(there) is type(operation["value"])


def test_plain_pods_follow_the_load() -> None:
    """By a series of the service that Prometheus' adapter gives Kubernetes under the name that is asked for."""
    found = installed({"scaling": {"min": 3, "max": 5}})
    (scaler,) = of_kind(found, "HorizontalPodAutoscaler")
    (deployment,) = of_kind(found, "Deployment")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 5)
    assert "replicas" not in deployment["spec"]
    (metric,) = scaler["spec"]["metrics"]
    (rule,) = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert rule["seriesQuery"].partition("{")[0].removesuffix("_total") in {family.name for family in Metrics().registry.collect()}
    target = float(metric["pods"]["target"]["averageValue"].removesuffix("m")) / 1000
    assert target == min(scaling.ENCODER_TARGET, scaling.GENERATOR_TARGET)
