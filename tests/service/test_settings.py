"""Where a setting comes from, and what is said about a bad one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service import cli
from service.settings import Settings, SettingsError, freeze, load
from tests.imports import ROOT
from tests.service.fakes import fake_bundle

SECRET = "sk-very-secret-key"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ATTNSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ATTNSERVE_CONFIG", "")  # so that what `load` writes there is taken back


def yaml(folder: Path, text: str) -> Path:
    file = folder / "attnserve.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_flags_go_before_the_environment_before_the_file_before_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = yaml(tmp_path, "port: 1\nbulk_inputs: 1\nthreads: 1\n")
    monkeypatch.setenv("ATTNSERVE_PORT", "2")
    monkeypatch.setenv("ATTNSERVE_BULK_INPUTS", "2")
    settings = load({"port": 3}, file)
    assert (settings.port, settings.bulk_inputs, settings.threads, settings.max_client_batch) == (3, 2, 1, 2048)


def test_the_file_can_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_CONFIG", str(yaml(tmp_path, "port: 1234")))
    assert load({}).port == 1234


def test_lists_are_written_with_commas_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_BUNDLES", "/a, /b,")
    monkeypatch.setenv("ATTNSERVE_API_KEYS", "12345678,abcdefgh")
    monkeypatch.setenv("ATTNSERVE_ALIASES", '{"text-embedding-3-small": "mini"}')
    settings = load({})
    assert settings.bundles == (Path("/a"), Path("/b"))
    assert [key.get_secret_value() for key in settings.api_keys] == ["12345678", "abcdefgh"]
    assert settings.aliases == {"text-embedding-3-small": "mini"}


A, B = "https://a.example", "http://localhost:3000"


@pytest.mark.parametrize(
    ("value", "origins"),
    [
        (f"{A}, {B}/,", (A, B)),
        (f'["{A}", "{B}"]', (A, B)),
        (f' ["{A.upper()}"]', (A,)),
        ("*", ("*",)),
        ('["*"]', ("*",)),
        ("null", ("null",)),
        ("", ()),
        ("[]", ()),
    ],
)
def test_origins_are_a_list_in_json_or_with_commas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, origins: Any) -> None:
    monkeypatch.setenv("ATTNSERVE_CORS_ORIGINS", value)
    assert load({}).cors_origins == origins
    monkeypatch.delenv("ATTNSERVE_CORS_ORIGINS")
    assert load({"cors_origins": value}).cors_origins == origins
    assert load({"cors_origins": list(origins)}).cors_origins == origins
    assert load({}, yaml(tmp_path, f"cors_origins: {value!r}")).cors_origins == origins


@pytest.mark.parametrize("value", ["app.example", f"{A}/path", '["a"', '{"a": 1}', "https://*.example", f'["{A},{B}"]', "[1]"])
def test_what_is_no_origin_stops_the_start(value: str) -> None:
    with pytest.raises(SettingsError, match="cors_origins") as refused:
        load({"cors_origins": value})
    assert "\n" not in str(refused.value)


def test_bundles_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load({"bundles": ["mini"]}).bundles == (tmp_path.resolve() / "mini",)


def test_a_bundle_whose_path_leads_nowhere_stops_the_start_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("round")
    for path in (tmp_path / "round", Path("~nobody-has-this-name/bundle")):
        with pytest.raises(SettingsError, match="cannot be resolved") as refused:
            load({"bundles": (path,)})
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour: red", "colour is not a setting. Settings: access_log, aliases"),
        ("port: x", "port='x' is not accepted"),
        ("port: 0", "port=0 is not accepted"),
        ("threads: 0", "threads=0 is not accepted"),
        ("request_timeout_s: -1", "request_timeout_s=-1 is not accepted"),
        ("a: [", "attnserve.yaml is not YAML"),
        ("[1, 2]", "attnserve.yaml is not a YAML mapping"),
        ("just words", "attnserve.yaml is not a YAML mapping"),
    ],
)
def test_a_bad_file_stops_the_start_with_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load({}, yaml(tmp_path, text))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["ATTNSERVE_PROT", "ATTNSERVE_port"])
def test_an_unknown_variable_stops_the_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=f"{name} is not a setting"):
        load({})


@pytest.mark.parametrize(("name", "value"), [("PORT", "x"), ("ALIASES", "{"), ("PROVIDER", "tpu"), ("AUTO_TRUNCATE", "perhaps")])
def test_a_bad_variable_stops_the_start_with_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"ATTNSERVE_{name}", value)
    with pytest.raises(SettingsError) as refused:
        load({})
    assert name.lower() in str(refused.value).lower()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["foo", "", "{"])
def test_aliases_that_are_not_json_are_shown_how_to_be(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ATTNSERVE_ALIASES", value)
    with pytest.raises(SettingsError) as refused:
        load({})
    assert str(refused.value) == f'ATTNSERVE_ALIASES={value!r} is not accepted: it must be JSON, such as {{"name": "model"}}'


@pytest.mark.parametrize("pool", ["gateways", "encoders", "generators"])
def test_the_most_replicas_are_not_fewer_than_the_fewest(pool: str) -> None:
    with pytest.raises(SettingsError, match=f"max_{pool}=1 is not accepted: .*it is less than {pool}=2"):
        load({pool: 2, f"max_{pool}": 1})
    assert getattr(load({pool: 2, f"max_{pool}": 2}), f"max_{pool}") == 2


def test_an_unknown_flag_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="colour is not a setting"):
        load({"colour": "red"})


@pytest.mark.parametrize(
    "value",
    [f"{SECRET},short", [SECRET, "short"], {"key": SECRET}, f'["{SECRET}"', f'["{SECRET}", 1]'],
    ids=["text", "list", "mapping", "no JSON", "JSON"],
)
def test_a_bad_key_is_refused_without_showing_any_key(value: Any) -> None:
    import traceback

    with pytest.raises(SettingsError) as refused:
        load({"api_keys": value})
    assert "api_keys" in str(refused.value)
    assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_keys_are_never_shown() -> None:
    settings = load({"api_keys": SECRET})
    for text in (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump())):
        assert SECRET not in text


def test_settings_survive_the_way_to_another_process() -> None:
    settings = load({"bundles": ["/a"], "api_keys": SECRET, "aliases": {"x": "y"}, "threads": 3, "cors_origins": "https://example.org"})
    again = Settings.model_validate_json(freeze(settings))
    assert again == settings
    assert again.api_keys[0].get_secret_value() == SECRET


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"aliases": {"ada": "huge"}}, "alias ada names model huge, which is not served. Served: mini"),
        ({"default_model": ("huge",)}, "default_model names model huge, which is not served. Served: mini"),
    ],
)
def test_a_name_of_nothing_stops_the_command_before_it_starts_a_process(tmp_path: Path, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        cli._settings({"bundles": (fake_bundle(tmp_path / "mini"),), **flags}, None)


@pytest.mark.parametrize("url", [f"redis://:{SECRET}@host:6379/0", f"rediss://me:{SECRET}@host", f"redis://host?password={SECRET}"])
def test_a_url_of_the_store_has_no_password(url: str) -> None:
    with pytest.raises(SettingsError, match="put the password into ATTNSERVE_STATES_PASSWORD") as refused:
        load({"states": url})
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("location", ["", "http://host", "redis://", "rediss:///0"])
def test_a_store_that_cannot_be_is_refused_at_the_start(location: str) -> None:
    with pytest.raises(SettingsError, match="states is not accepted"):
        load({"states": location})


def test_a_store_in_a_directory_has_an_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load({"states": "kept"}).states == str(tmp_path / "kept")
    assert load({"states": "~/kept"}).states == str(Path("~/kept").expanduser())
    assert load({"states": "memory"}).states == "memory"
    assert load({"states": "rediss://me@host:1/2"}).states == "rediss://me@host:1/2"


def test_the_password_of_the_store_is_no_unknown_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_STATES_PASSWORD", SECRET)
    assert SECRET not in freeze(load({}))


def test_the_page_of_settings_is_what_the_command_writes(tmp_path: Path) -> None:
    """In a process of its own, because the tests' default of `states` is another one."""
    (tmp_path / "docs").mkdir()
    subprocess.run([sys.executable, "-m", "service.settings_page"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert (ROOT / "docs/settings.md").read_text() == (tmp_path / "docs/settings.md").read_text(), "run python -m service.settings_page"
