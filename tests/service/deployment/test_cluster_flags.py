"""What Ray is told beside the application: flags that must follow the settings."""

import os
import warnings
from pathlib import Path

import pytest

from service.deployment.flags import prepare
from service.settings import Settings
from tests.service.fakes import fake_bundle

HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"


def test_haproxys_old_process_outlives_the_longest_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a connection is kept idle (620 s), the request, and 30 s: at its end it cuts what it still carries."""
    settings = Settings(profile="split", bundles=(fake_bundle(tmp_path / "mini"),), request_timeout_s=900.5)
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    prepare(settings)
    monkeypatch.undo()
    assert environ[HARD_STOP] == "1551"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, as it is imported
        from service.deployment import config
    assert f"#   {HARD_STOP}=1551\n" in config.render(settings)
