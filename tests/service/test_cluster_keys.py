"""Keys of the API do not lie in a cluster's books: Serve stores the application without them, and a gateway reads its node's."""

import json
import warnings
from pathlib import Path

import pytest

from service.settings import Settings, SettingsError, freeze
from tests.bundles import tiny_encoder_bundle

with warnings.catch_warnings():  # Ray's own, at import
    warnings.simplefilter("ignore")
    from ray.serve._private.build_app import build_app

    from service.deployment.split import application, with_keys

KEY = "do-not-tell-anybody"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder_bundle(tmp_path_factory.mktemp("keys") / "tiny")


def arguments(tiny: Path) -> dict[str, tuple]:
    """Of each deployment's constructor."""
    built = build_app(application({"bundles": [str(tiny)]}), name="attnserve")
    return {deployment.name: deployment.init_args for deployment in built.deployments}


def test_what_serve_stores_has_no_key(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_API_KEYS", KEY)
    stored = arguments(tiny)
    assert set(stored) == {"gateway", "encoder"}
    assert KEY not in str(stored)
    assert stored["gateway"][2] is True, "the gateway is told to read its own"


def test_without_keys_a_gateway_reads_none(tiny: Path) -> None:
    assert arguments(tiny)["gateway"][2] is False


def test_a_gateway_takes_the_keys_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_API_KEYS", KEY)
    assert json.loads(with_keys(freeze(Settings())))["api_keys"] == [KEY]


def test_a_gateway_without_the_keys_of_its_head_does_not_start() -> None:
    with pytest.raises(SettingsError, match="give it to every node"):
        with_keys(freeze(Settings()))
