"""deploy/ as `kubectl apply -k` would send it, and the ways to look into it that several tests share."""

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

from tests.service.fakes import PATIENCE_S

DEPLOY = Path(__file__).parents[2] / "deploy"
RAY_OVERLAYS = ("base", "overlays/cpu", "overlays/gpu", "overlays/ha", "overlays/gpu + ha")  # + a component that an overlay of a user names
OVERLAYS = (*RAY_OVERLAYS, "overlays/plain")
ALL = (*OVERLAYS, "overlays/kind", "load")
COMPONENTS = ("models-volume", "fetch", "traces", "states")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod template and where it stands."""

    role: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        assert len(self.spec["containers"]) == 1
        return dict(self.spec["containers"][0])


def render(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization."""
    return list(yaml.safe_load_all(rendered(folder)))


def rendered(folder: Path) -> str:
    """The same as it is sent; the test is skipped where neither kubectl nor kustomize is installed."""
    command = next(
        ([*each, str(folder)] for each in (("kubectl", "kustomize"), ("kustomize", "build")) if shutil.which(each[0])),
        None,
    )
    if command is None:
        pytest.skip("neither kubectl nor kustomize is installed: the manifests of deploy/ are not rendered and not checked")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def with_component(folder: Path, overlay: str, *components: str, more: str = "") -> list[Manifest]:
    """The manifests of an overlay that names these components too, as a kustomization in `folder` with the lines `more`."""
    overlay, *named = overlay.split(" + ")
    deploy = Path(*[".."] * (len(folder.parts) - 1)) / DEPLOY.relative_to("/")  # kustomize takes no absolute paths
    listed = ", ".join(str(deploy / "components" / each) for each in (*named, *components))
    (folder / "kustomization.yaml").write_text(f"resources: [{deploy / overlay}]\ncomponents: [{listed}]\n{more}")
    return render(folder)


@cache
def manifests(overlay: str) -> list[Manifest]:
    if " + " not in overlay:
        return render(DEPLOY / overlay)
    with tempfile.TemporaryDirectory() as folder:
        return with_component(Path(folder), overlay)


def of_kind(found: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in found if each["kind"] == kind]


def ray_service(overlay: str) -> dict[str, Any]:
    """The spec of the one RayService."""
    (found,) = of_kind(manifests(overlay), "RayService")
    return dict(found["spec"])


def pods(found: list[Manifest]) -> Iterator[Pod]:
    """Every pod that these manifests lead to."""
    for each in found:
        spec = each.get("spec", {})
        if each["kind"] == "RayService":
            cluster = spec["rayClusterConfig"]
            for role, group in (("head", cluster["headGroupSpec"]), *(("worker", one) for one in cluster["workerGroupSpecs"])):
                yield Pod(role, group["template"]["metadata"]["labels"], group["template"]["spec"])
        elif each["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield Pod(each["metadata"]["name"], spec["template"]["metadata"]["labels"], spec["template"]["spec"])


def environment(found: list[Manifest], pod: Pod, container: dict[str, Any] | None = None) -> dict[str, str]:
    """What the ConfigMaps that a pod names put into the environment of its container, or of this one."""
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(found, "ConfigMap")}
    named = [source["configMapRef"]["name"] for source in (container or pod.container).get("envFrom", ()) if "configMapRef" in source]
    return {name: value for each in named for name, value in maps[each].items()}
