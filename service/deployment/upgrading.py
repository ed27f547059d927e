"""Upgrades a RayService to a new Ray cluster that is as large as the running one.

KubeRay starts the new cluster with the least numbers of workers and replicas in the RayService, and then moves all traffic to it at once.
So they are raised to what runs in the upgrade's own apply, and lowered when the new cluster has the traffic. Only numbers that are scaled
automatically are changed.
"""

import copy
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from service.errors import AttnserveError

Manifest = dict[str, Any]
LOOK_EVERY_S = 5.0


class UpgradeFailed(AttnserveError):
    """The cluster cannot be upgraded, or not yet."""


def upgrade(manifests: list[Manifest], namespace: str, timeout_s: float, say: Callable[[str], None]) -> None:
    """Apply `manifests`, which contain one RayService, and return when its new cluster has the traffic. `say` gets a line for each step.

    Raises UpgradeFailed if there is no RayService, if kubectl fails, or if the upgrade takes longer than `timeout_s` seconds. The same
    command can then be given again.
    """
    kubectl = Kubectl(namespace)
    service = ray_service(manifests)
    name = service["metadata"]["name"]
    before = kubectl.active_cluster(name)
    if before is None:
        say("no cluster runs yet: it starts with the numbers of the manifests")
        kubectl.apply(manifests)
        return
    raised = as_running(service, kubectl.workers(before), kubectl.replicas(before))
    say(f"{before} has {numbers(raised)}: the new cluster starts with as many")
    kubectl.apply([raised if each is service else each for each in manifests])
    after = kubectl.settled(name, timeout_s, say)
    kubectl.apply(manifests)
    if after != before:  # KubeRay reads a cluster's numbers of workers only when it makes the cluster
        kubectl.patch_least(after, service)
    say(f"{after} serves; its numbers may fall to {numbers(service)} again")


def ray_service(manifests: list[Manifest]) -> Manifest:
    """Return the RayService among `manifests`. Raises UpgradeFailed if there is not exactly one."""
    found = [each for each in manifests if each.get("kind") == "RayService"]
    if len(found) != 1:
        raise UpgradeFailed(
            f"the manifests contain {len(found)} RayServices and one is needed: plain Deployments need no upgrade of this kind"
        )
    return found[0]


def as_running(service: Manifest, workers: dict[str, int], replicas: dict[str, int]) -> Manifest:
    """Return a copy of a RayService whose next cluster has at least `workers` (by worker group) and `replicas` (by deployment), within the
    RayService's upper limits.
    """
    raised = copy.deepcopy(service)
    spec = raised["spec"]
    if spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
        for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
            least = max(group["minReplicas"], min(workers.get(group["groupName"], 0), group["maxReplicas"]))
            group["replicas"] = group["minReplicas"] = least
    config = yaml.safe_load(spec["serveConfigV2"])
    for deployment in config["applications"][0]["deployments"]:
        if scaling := deployment.get("autoscaling_config"):
            scaling["min_replicas"] = max(scaling["min_replicas"], min(replicas.get(deployment["name"], 0), scaling["max_replicas"]))
    spec["serveConfigV2"] = yaml.safe_dump(config, sort_keys=False)
    return raised


def numbers(service: Manifest) -> str:
    """Return a RayService's least numbers as text."""
    groups = {group["groupName"]: group["minReplicas"] for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    for each in config["applications"][0]["deployments"]:
        groups[each["name"]] = each.get("autoscaling_config", {}).get("min_replicas", each.get("num_replicas"))
    return ", ".join(f"{name} {number}" for name, number in groups.items())


def rendered(folder: Path | None, file: Path | None) -> list[Manifest]:
    """Return the manifests of a kustomize folder, or of a file of YAML documents (`/dev/stdin` for what `helm template` prints)."""
    if (folder is None) == (file is None):
        raise UpgradeFailed("name either a kustomize folder with -k or a file of manifests with -f")
    text = _run(["kubectl", "kustomize", "--enable-helm", str(folder)]) if file is None else file.read_text()
    return [each for each in yaml.safe_load_all(text) if each]


class Kubectl:
    """What an upgrade asks and tells the cluster, through the command `kubectl` with its own credentials."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def apply(self, manifests: list[Manifest]) -> None:
        self._call("apply", "-f", "-", stdin=yaml.safe_dump_all(manifests, sort_keys=False))

    def active_cluster(self, name: str) -> str | None:
        """Return the name of the RayCluster that has the traffic, or None."""
        found = self._call("get", "rayservice", name, "--ignore-not-found", "-o", "json")
        return _active(json.loads(found)) if found.strip() else None

    def workers(self, cluster: str) -> dict[str, int]:
        """Return the present number of workers of each group; Ray's autoscaler writes it into the RayCluster."""
        spec = json.loads(self._call("get", "raycluster", cluster, "-o", "json"))["spec"]
        return {group["groupName"]: group.get("replicas") or 0 for group in spec["workerGroupSpecs"]}

    def replicas(self, cluster: str) -> dict[str, int]:
        """Return the number of running replicas of each deployment, as Serve on the head says."""
        head = self._call("get", "pod", "-l", f"ray.io/cluster={cluster},ray.io/node-type=head", "-o", "name").split()[0]
        status = yaml.safe_load(self._call("exec", head, "-c", "ray-head", "--", "serve", "status"))
        (application,) = status["applications"].values()
        return {name: sum(each["replica_states"].values()) for name, each in application["deployments"].items()}

    def patch_least(self, cluster: str, service: Manifest) -> None:
        """Give a running cluster the least numbers of workers that the RayService has."""
        groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        paths = [f"/spec/workerGroupSpecs/{n}/minReplicas" for n in range(len(groups))]
        patch = [{"op": "replace", "path": path, "value": each["minReplicas"]} for path, each in zip(paths, groups, strict=True)]
        self._call("patch", "raycluster", cluster, "--type=json", "-p", json.dumps(patch))

    def settled(self, name: str, timeout_s: float, say: Callable[[str], None]) -> str:
        """Wait until KubeRay has seen the RayService and no other cluster is being prepared. Return the name of the cluster with the
        traffic. It must be so at two looks, because KubeRay may name the new cluster after it has seen the change.
        """
        until, quiet, said = time.monotonic() + timeout_s, 0, ""
        while True:
            found = json.loads(self._call("get", "rayservice", name, "-o", "json"))
            pending = found["status"].get("pendingServiceStatus", {}).get("rayClusterName")
            seen = found["status"].get("observedGeneration") == found["metadata"]["generation"]
            quiet = quiet + 1 if seen and not pending else 0
            active = _active(found)
            if quiet == 2 and active:
                return active
            if pending and pending != said:
                said = pending
                say(f"waiting until {pending} is ready")
            if time.monotonic() > until:
                raise UpgradeFailed(
                    f"{pending or name} was not ready after {timeout_s:g} s, and {active} still serves: "
                    f"see `kubectl describe rayservice {name}`, then repeat the command, or give it the old manifests to roll back"
                )
            time.sleep(LOOK_EVERY_S)

    def _call(self, *arguments: str, stdin: str | None = None) -> str:
        return _run(["kubectl", "-n", self._namespace, *arguments], stdin)


def _active(service: Manifest) -> str | None:
    return service.get("status", {}).get("activeServiceStatus", {}).get("rayClusterName") or None


def _run(command: list[str], stdin: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UpgradeFailed("kubectl is not installed: it is needed to reach the cluster") from None
    if done.returncode:
        raise UpgradeFailed(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
