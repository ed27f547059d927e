"""`attnserve upgrade`, with a program in the place of kubectl: there is no Kubernetes here."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from service.cli import app
from service.deployment import upgrading
from tests.deploy.rendered import DEPLOY, OVERLAYS, helm, installed

pytestmark = pytest.mark.live

# Answers as kubectl would for a cluster "old" of five workers, and writes what it is told to apply. The first apply makes KubeRay prepare a
# cluster "new", which is ready at the fourth look.
KUBECTL = """#!{python}
import json, pathlib, subprocess, sys
folder = pathlib.Path("{folder}")
arguments = sys.argv[1:]
with open(folder / "calls", "a") as calls:
    print(json.dumps(arguments), file=calls)
if arguments[0] == "kustomize":
    sys.exit(subprocess.call(["{kubectl}", *arguments]))
verb, rest = arguments[2], arguments[3:]
applied = sorted(folder.glob("applied-*"))
looks = len([line for line in open(folder / "calls") if "rayservice" in line])
ready = bool(applied) and looks > 4
if verb == "apply":
    (folder / f"applied-{{len(applied)}}").write_text(sys.stdin.read())
elif verb == "get" and rest[0] == "rayservice":
    status = {{"observedGeneration": 2, "activeServiceStatus": {{"rayClusterName": "new" if ready else "old"}}}}
    if applied and not ready:
        status["pendingServiceStatus"] = {{"rayClusterName": "new"}}
    print(json.dumps({{"metadata": {{"generation": 2}}, "status": status}}) if {runs} else "")
elif verb == "get" and rest[0] == "raycluster":
    groups = {{"generators": 12, "encoders": 5}}
    print(json.dumps({{"spec": {{"workerGroupSpecs": [{{"groupName": name, "replicas": number}} for name, number in groups.items()]}}}}))
elif verb == "get":
    print("pod/old-head")
elif verb == "exec":
    deployments = {{"gateway": 3, "encoder": 5, "generator": 12}}
    print(json.dumps({{"applications": {{"attnserve": {{"deployments": {{
        name: {{"replica_states": {{"RUNNING": number}}}} for name, number in deployments.items()}}}}}}}}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(upgrading, "LOOK_EVERY_S", 0.0)
    install(tmp_path, monkeypatch)
    return tmp_path


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, runs: bool = True) -> None:
    program = folder / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable, folder=folder, kubectl=shutil.which("kubectl"), runs=runs))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def upgrade(folder: Path, *arguments: str) -> str:
    """Give the command the rendered overlay `cpu` as a file, and return what it prints."""
    file = folder / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(installed(OVERLAYS["cpu"])))
    done = CliRunner().invoke(app, ["upgrade", "-f", str(file), *arguments], catch_exceptions=False)
    return done.output


def applied(folder: Path) -> list[dict[str, Any]]:
    """The RayService of each apply."""
    texts = [each.read_text() for each in sorted(folder.glob("applied-*"))]
    return [next(each for each in yaml.safe_load_all(text) if each["kind"] == "RayService") for text in texts]


def least(service: dict[str, Any]) -> dict[str, int]:
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert all(group["replicas"] == group["minReplicas"] for group in groups)
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    replicas = {each["name"]: each["autoscaling_config"]["min_replicas"] for each in config["applications"][0]["deployments"]}
    return {group["groupName"]: group["minReplicas"] for group in groups} | replicas


def test_the_new_cluster_starts_as_large_as_the_running_one(folder: Path) -> None:
    upgrade(folder)
    raised, lowered = applied(folder)
    assert least(raised) == {"encoders": 5, "generators": 8, "gateway": 3, "encoder": 5, "generator": 8}, "at most 8"
    assert least(lowered) == dict.fromkeys(("encoders", "generators", "gateway", "encoder", "generator"), 2)
    calls = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    (patch,) = [call for call in calls if "patch" in call]
    assert patch[2:5] == ["patch", "raycluster", "new"]
    paths = [f"/spec/workerGroupSpecs/{group}/minReplicas" for group in (0, 1)]
    assert json.loads(patch[-1]) == [{"op": "replace", "path": path, "value": 2} for path in paths]


def test_the_first_installation_applies_the_manifests_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(folder, monkeypatch, runs=False)
    upgrade(folder)
    (service,) = applied(folder)
    assert least(service)["encoders"] == 2


def test_fixed_numbers_are_not_raised() -> None:
    service = upgrading.ray_service(installed({"rayService": {"enabled": True}, "scaling": {"enabled": False}}))
    raised = upgrading.as_running(service, {"encoders": 5}, {"encoder": 5})
    assert raised["spec"]["rayClusterConfig"] == service["spec"]["rayClusterConfig"]
    assert yaml.safe_load(raised["spec"]["serveConfigV2"]) == yaml.safe_load(service["spec"]["serveConfigV2"])


def test_a_cluster_that_does_not_become_ready_names_the_next_step(folder: Path) -> None:
    with pytest.raises(upgrading.UpgradeFailed, match=r"new was not ready after 0 s, and old still serves: see `kubectl describe"):
        upgrading.upgrade(installed(OVERLAYS["cpu"]), "attnserve", 0, lambda line: None)


def test_manifests_without_a_ray_service_are_refused(folder: Path) -> None:
    with pytest.raises(upgrading.UpgradeFailed, match="contain 0 RayServices"):
        upgrading.upgrade(installed(OVERLAYS["plain"]), "attnserve", 0, lambda line: None)
    assert not applied(folder)


def test_a_folder_is_rendered_by_kustomize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(helm()).parent), prepend=":")
    assert upgrading.ray_service(upgrading.rendered(DEPLOY / "overlays" / "cpu", None))["metadata"]["name"] == "attnserve"
