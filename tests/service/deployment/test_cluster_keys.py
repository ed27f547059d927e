"""Keys of the API do not lie in a cluster's books: Serve stores the application without them, and a gateway reads its node's."""

import json
import warnings
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from export import contract
from service import app
from service.call import Call
from service.pools.catalog import GatewayCatalog
from service.settings import Settings, SettingsError, check_names, freeze

with warnings.catch_warnings():  # Ray's own, at import
    warnings.simplefilter("ignore")
    from ray.serve._private.build_app import build_app

    from service.deployment.split import application, with_keys

KEY = "do-not-tell-anybody"


def arguments(*bundles: Path, **settings: Any) -> dict[str, tuple]:
    """Of each deployment's constructor."""
    built = build_app(application({"bundles": [str(bundle) for bundle in bundles], **settings}), name="attnserve")
    return {deployment.name: deployment.init_args for deployment in built.deployments}


def test_what_serve_stores_has_no_key(encoder_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_API_KEYS", KEY)
    stored = arguments(encoder_bundle)
    assert set(stored) == {"gateway", "encoder"}
    assert KEY not in str(stored)
    assert stored["gateway"][2] is True, "the gateway is told to read its own"


def test_a_file_of_keys_is_read_by_gateways_alone(encoder_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve stores its path; the node that reads the configuration needs no such file, and replicas behind a gateway read none."""
    file = tmp_path / "keys.json"
    monkeypatch.setenv("ATTNSERVE_API_KEYS_FILE", str(file))
    stored = arguments(encoder_bundle)
    assert stored["gateway"][2] is False
    assert json.loads(stored["gateway"][0])["api_keys_file"] == str(file)
    assert json.loads(stored["encoder"][0])["api_keys_file"] is None
    gateway = Settings.model_validate_json(stored["gateway"][0])
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        app.build_app(GatewayCatalog(gateway, encoders=None, generators=None))
    file.write_text(json.dumps([{"name": "ci", "sha256": sha256(KEY.encode()).hexdigest(), "tenant": "acme"}]))
    call = Call("id", 0.0)
    app.build_app(GatewayCatalog(gateway, encoders=None, generators=None)).keys.identify(KEY, call)
    assert (call.client, call.key) == ("tenant:acme", "ci")


def test_a_gateway_takes_the_keys_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_API_KEYS", KEY)
    assert json.loads(with_keys(freeze(Settings())))["api_keys"] == [KEY]


def test_a_gateway_without_the_keys_of_its_head_does_not_start() -> None:
    with pytest.raises(SettingsError, match="set it on every node"):
        with_keys(freeze(Settings()))


def test_only_gateways_get_the_names_that_may_be_those_of_another_pools_model(encoder_bundle: Path, decoder_bundle: Path) -> None:
    names = {pool: contract.read_manifest(bundle).name for pool, bundle in (("encoder", encoder_bundle), ("generator", decoder_bundle))}
    stored = arguments(encoder_bundle, decoder_bundle, default_model=list(names.values()), aliases={"other": names["generator"]})
    for pool, name in names.items():
        check_names(Settings.model_validate_json(stored[pool][0]), [name])
    check_names(Settings.model_validate_json(stored["gateway"][0]), list(names.values()))
