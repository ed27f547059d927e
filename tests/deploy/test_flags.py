"""Every flag and setting that is set or documented here is read by the Ray, or the service, that is installed."""

import re
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from service import settings
from service.deployment import flags
from tests.deploy.rendered import DEPLOY

ROOT = DEPLOY.parent
RAY = Path(str((find_spec("ray") or pytest.fail("no ray")).origin)).parent
# What C++ reads: there the name of a variable is a string.
BINARIES = ("_raylet.so", "core/src/ray/raylet/raylet", "core/src/ray/gcs/gcs_server")
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "docs", "deploy", "loadtest")
WRITTEN = (".md", ".env", ".yaml", ".py", "Dockerfile")


def texts(*places: str) -> str:
    """All that is written there."""
    found = []
    for place in places:
        path = ROOT / place
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file() and each.name.endswith(WRITTEN)]
        found += [each.read_text() for each in files]
    return "\n".join(found)


@cache
def ray_itself() -> bytes:
    """Its sources in Python, and what is compiled."""
    sources = [path for part in ("serve", "_private", "_common", "scripts") for path in (RAY / part).rglob("*.py")]
    return b"\n".join(path.read_bytes() for path in [*sources, *(RAY / each for each in BINARIES)])


def ray_flags() -> list[str]:
    named = set(re.findall(r"\bRAY_[A-Za-z0-9_]*[A-Za-z0-9]\b", texts(*DOCUMENTS, "service")))
    return sorted({*named, *(name for name in flags.cluster_flags(settings.Settings()) if name.startswith("RAY_"))})


@pytest.mark.parametrize("name", ray_flags())
def test_ray_reads(name: str) -> None:
    assert name.encode() in ray_itself(), f"nothing in Ray has {name}"


def test_settings_that_are_documented_are_there() -> None:
    named = {each.removeprefix(settings.PREFIX).lower() for each in re.findall(rf"\b{settings.PREFIX}[A-Z_]*[A-Z]\b", texts(*DOCUMENTS))}
    others = {"name", "states_password"}  # ATTNSERVE_NAME is how the form of them all is said; a password is no setting
    assert named - others <= settings.Settings.model_fields.keys()


def test_the_printed_configuration_warns_of_nothing() -> None:
    """With everything scaled. Only one warning is known: Ray's announcement that it will replace `metrics_interval_s` (scaling.py)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, as it is imported
        from ray.serve.config import AutoscalingConfig

        from service.deployment import split
    asked = settings.Settings(max_encoders=4, max_generators=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        for role in ("encoder", "generator"):
            AutoscalingConfig(**split._options(asked, role, 0.5)["autoscaling_config"])
