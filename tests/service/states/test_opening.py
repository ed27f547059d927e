"""The store that the settings name."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service import cli
from service.settings import SettingsError
from service.states.opening import open_engine


def refused(bundle: Path, *options: str) -> str:
    """The error of `attnserve serve`."""
    done = CliRunner().invoke(cli.app, ["serve", "--bundle", str(bundle), *options])
    assert isinstance(done.exception, SettingsError), done.output
    return str(done.exception)


@pytest.fixture(autouse=True)
def unstarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command does not come to listen, which it does before it starts Ray."""
    monkeypatch.setattr("service.deployment.front.listen", lambda *address: pytest.fail("the settings were not checked"))


def test_profile_split_refuses_a_store_in_memory(encoder_bundle: Path) -> None:
    """Each process would have a store of its own, and a state of one generator would be missing in the other."""
    error = refused(encoder_bundle, "--profile", "split", "--set", "states=memory")
    assert "states=memory is a store of one process, and profile split has several" in error


def test_a_store_in_redis_without_redis_py_is_refused_before_ray_starts(encoder_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    assert "pip install 'attnserve[redis]'" in refused(encoder_bundle, "--set", "states=redis://localhost:6379/0")
    with pytest.raises(SettingsError, match="needs redis-py"):
        open_engine("redis://localhost:6379/0")
