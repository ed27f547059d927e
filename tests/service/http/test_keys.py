"""API keys from a file: they identify tenants, limits and usage follow them, and the file may change while requests run."""

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from service.cli import app as command
from service.http import keys
from service.settings import Settings, SettingsError, load
from service.telemetry.metrics import Metrics
from tests.service import fakes
from tests.service.fakes import PATIENCE_S, case, client, fake_app, fake_bundle, serve_in_thread, until
from tests.service.generation_fakes import FakeGenerator, generator_app
from tests.service.http.test_edge import Caller, said, whose

ACME, GLOBEX, PLAIN = "sk-acme-0123456789", "sk-globex-0123456789", "a-plain-key-0123"


def entry(key: str, tenant: str = "acme", name: str = "ci", **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **more}


def write(path: Path, *entries: Any) -> Path:
    """In the place of what is there, at once."""
    path.parent.mkdir(exist_ok=True, parents=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(entries))
    fresh.replace(path)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def embed(http: httpx.AsyncClient, key: str, text: Any = "the cat", **options: Any) -> Any:
    return http.post("/v1/embeddings", json={"input": text}, headers=bearer(key), **options)


def limits(answer: httpx.Response) -> dict[str, str]:
    return {name.removeprefix("x-ratelimit-"): value for name, value in answer.headers.items() if name.startswith("x-ratelimit-")}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return fake_bundle(tmp_path / "mini")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "keys.json"


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is looked at as often as the loop turns."""
    monkeypatch.setattr(keys, "_CHECKED_EVERY_S", 0.001)


@asynccontextmanager
async def served(*bundles: Path, file: Path, **settings: Any) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    app = fake_app(*bundles, api_keys_file=file, **settings)
    async with client(app) as http:
        yield app, http


# The tenant of a request -----------------------------------------------------------------------------------------------------------------


async def test_keys_of_the_file_and_of_the_settings_open_and_no_others(bundle: Path, file: Path) -> None:
    write(file, entry(ACME), entry(GLOBEX, "globex"))
    async with served(bundle, file=file, api_keys=(PLAIN,)) as (_, http):
        for key in (ACME, GLOBEX, PLAIN):
            assert (await embed(http, key)).status_code == 200
        for key in ("", "sk-other-0123456789", ACME[:-1], entry(ACME)["sha256"], "é"):
            refused = await http.post(
                "/v1/embeddings", json={"input": "cat"}, headers=[("authorization", f"Bearer {key}".encode("latin-1"))]
            )
            assert said(refused) == (401, "authentication_error", "invalid_api_key")
            assert not limits(refused)


async def test_a_file_without_keys_refuses_every_request(bundle: Path, file: Path) -> None:
    async with served(bundle, file=write(file)) as (_, http):
        assert (await embed(http, ACME)).status_code == 401
        assert (await http.post("/v1/embeddings", json={"input": "cat"})).status_code == 401


async def test_shares_are_the_tenants(bundle: Path, file: Path) -> None:
    """Two keys of a tenant are one client of the queues; another tenant is another."""
    second = "sk-second-0123456789"
    write(file, entry(ACME), entry(second, name="second"), entry(GLOBEX, "globex"))
    seen = [await whose(bundle, bearer(key), api_keys_file=file) for key in (ACME, second, GLOBEX)]
    assert seen == [("tenant:acme",) * 2, ("tenant:acme",) * 2, ("tenant:globex",) * 2]


@pytest.mark.parametrize(("pooled", "headers"), [(False, {}), (False, {"x-other": "not a plain request"}), (True, {})])
def test_a_text_is_computed_again_for_another_tenant(
    bundle: Path, file: Path, monkeypatch: pytest.MonkeyPatch, pooled: bool, headers: dict[str, str]
) -> None:
    """A vector from the cache comes faster, which would reveal that another tenant has sent the same text."""
    monkeypatch.setattr(fakes, "pooled", pooled)
    write(file, entry(ACME), entry("sk-second-0123456789", name="second"), entry(GLOBEX, "globex"))
    app = fake_app(bundle, api_keys_file=file)
    runs = []
    with serve_in_thread(app) as url, httpx.Client(base_url=url) as http:
        for key in (ACME, "sk-second-0123456789", GLOBEX):
            assert http.post("/v1/embeddings", json={"input": "the cat"}, headers=bearer(key) | headers).status_code == 200
            runs.append(len(app.state.catalog.session("mini").batches))
    assert runs == [1, 1, 2]


async def test_the_access_log_names_tenant_and_key_and_nothing_holds_a_key(
    bundle: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, entry(ACME, name="nightly"))
    logging.getLogger("attnserve").propagate = True
    with caplog.at_level(logging.DEBUG):
        async with served(bundle, file=file, access_log=True, api_keys=(PLAIN,)) as (_, http):
            told = [await embed(http, ACME), await embed(http, PLAIN), await embed(http, "sk-unknown-0123456789")]
            told += [await http.get(path, headers=bearer(ACME)) for path in ("/info", "/metrics", "/", "/v1/usage", "/openapi.json")]
    (record,) = [each for each in caplog.records if getattr(each, "tenant", None) == "acme" and each.path == "/v1/embeddings"]  # type: ignore[attr-defined]
    assert record.key == "nightly"  # type: ignore[attr-defined]
    logged = "".join(str(vars(each)) for each in caplog.records) + "".join(each.text for each in told)
    for secret in (ACME, PLAIN, "sk-unknown-0123456789", entry(ACME)["sha256"][:8]):
        assert secret not in logged
    assert hashlib.sha256(PLAIN.encode()).hexdigest()[:8] not in told[4].text, "/metrics is open"


# Limits ----------------------------------------------------------------------------------------------------------------------------------


async def test_requests_over_the_limit_are_429_in_each_dialect_with_openais_headers(bundle: Path, file: Path) -> None:
    write(file, entry(ACME, requests_per_minute=3, tokens_per_minute=1000), entry(GLOBEX, "globex"))
    async with served(bundle, file=file) as (_, http):
        first = await embed(http, ACME)
        tokens = first.json()["usage"]["prompt_tokens"]
        assert limits(first) == {
            "limit-requests": "3",
            "remaining-requests": "2",
            "reset-requests": limits(first)["reset-requests"],
            "limit-tokens": "1000",
            "remaining-tokens": str(1000 - tokens),
            "reset-tokens": limits(first)["reset-tokens"],
        }
        assert 19 < float(limits(first)["reset-requests"].removesuffix("s")) <= 20
        assert limits(await http.get("/v1/models", headers=bearer(ACME)))["remaining-requests"] == "1"
        missing = await http.get("/nowhere", headers=bearer(ACME))
        assert (missing.status_code, limits(missing)["remaining-requests"]) == (404, "0")
        refused = await embed(http, ACME)
        assert said(refused) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert "tenant acme" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert 0 < int(refused.headers["retry-after-ms"]) <= 20_000
        assert limits(refused)["remaining-requests"] == "0"
        for path in ("/embed", "/v2/embed", "/v1/rerank", "/v2/models/mini/infer", "/generate"):
            told = await http.post(path, json={}, headers=bearer(ACME))
            assert (told.status_code, "retry-after" in told.headers) == (429, True), path
            assert limits(told)["limit-requests"] == "3"
        other = await embed(http, GLOBEX)
        assert (other.status_code, limits(other)) == (200, {})


async def test_who_leaves_a_stream_of_rows_is_charged_for_it(bundle: Path, file: Path) -> None:
    app = fake_app(bundle, threads=1, api_keys_file=write(file, entry(ACME, tokens_per_minute=1000)))
    async with client(app) as http:
        session = app.state.catalog.session("mini")
        session.hold()
        leaving = Caller(app, headers={**bearer(ACME), "accept": "application/x-ndjson"})
        leaving.body(b'{"input": ["the cat", "the dog"]}')
        await session.entered(1)
        leaving.hang_up()
        await leaving.done()
        session.open()
        used = (await http.get("/v1/usage", headers=bearer(ACME))).json()
        assert used["prompt_tokens"] == 8


async def test_streams_at_the_same_time_are_bounded_and_a_client_that_leaves_gives_its_one_back(file: Path) -> None:
    model = FakeGenerator("wordy")
    app = generator_app(model, api_keys_file=write(file, entry(ACME, streams=1), entry(GLOBEX, "globex")))
    body = {"model": "wordy", "prompt": "a", "stream": True}
    async with client(app) as http:
        model.engine.hold(after=1)
        first = Caller(app, path="/v1/completions", headers=bearer(ACME))
        first.body(json.dumps(body).encode())
        await until(lambda: len(first.sent) > 1)
        refused = await http.post("/v1/completions", json=body, headers=bearer(ACME))
        assert said(refused) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert len(model.engine.runs) == 1, "what is refused is not begun"
        tgi = await http.post("/generate_stream", json={"inputs": "a"}, headers=bearer(ACME))
        assert (tgi.status_code, tgi.json()["error_type"]) == (429, "overloaded")
        first.hang_up()
        await first.done()
        model.engine.release()
        whole = await http.post("/v1/completions", json=body, headers=bearer(ACME))
        assert (whole.status_code, whole.text.endswith("data: [DONE]\n\n")) == (200, True)
        again = await http.post("/v1/completions", json={**body, "max_tokens": 0}, headers=bearer(ACME))
        assert again.status_code != 429, "and so does one that has ended"


# Usage -----------------------------------------------------------------------------------------------------------------------------------


async def test_usage_is_the_tenants_own_by_model(file: Path) -> None:
    model = FakeGenerator("wordy")
    write(
        file,
        entry(ACME, requests_per_minute=3),
        entry("sk-second-0123456789", name="second", requests_per_minute=3),
        entry(GLOBEX, "globex"),
    )
    async with client(generator_app(model, api_keys_file=file)) as http:
        spent = []
        for key, stream in ((ACME, False), ("sk-second-0123456789", True)):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            body = {"model": "wordy", "prompt": "abc", "max_tokens": 5, **options}
            told = await http.post("/v1/completions", json=body, headers=bearer(key))
            assert told.status_code == 200
            spent.append(json.loads(told.text.split("data: ")[-2].splitlines()[0])["usage"] if stream else told.json()["usage"])
        await http.post("/v1/completions", json={"model": "nothing", "prompt": "a"}, headers=bearer(ACME))
        assert (await http.post("/v1/completions", json={}, headers=bearer(ACME))).status_code == 429
        used = await http.get("/v1/usage", headers=bearer(ACME))
        counts = {
            "requests": 2,
            "prompt_tokens": sum(each["prompt_tokens"] for each in spent),
            "completion_tokens": sum(each["completion_tokens"] for each in spent),
            "total_tokens": sum(each["total_tokens"] for each in spent),
        }
        assert counts["completion_tokens"] == 10
        since = used.json()["since"]
        assert used.json() == {
            "object": "usage",
            "tenant": "acme",
            "key": "ci",
            "since": since,
            "scope": "process",
            **counts,
            "models": [{"model": "wordy", **counts}],
        }
        assert limits(used)["remaining-requests"] == "0"
        other = (await http.get("/v1/usage", headers=bearer(GLOBEX))).json()
        assert (other["tenant"], other["requests"], other["models"]) == ("globex", 0, [])
        assert said(await http.get("/v1/usage")) == (401, "authentication_error", "invalid_api_key")
        assert said(await http.post("/v1/usage", headers=bearer(GLOBEX))) == (405, "invalid_request_error", "method_not_allowed")


async def test_limits_and_usage_are_those_of_all_gateways_of_a_store(bundle: Path, file: Path, tmp_path: Path) -> None:
    write(file, entry(ACME, requests_per_minute=4))

    @asynccontextmanager
    async def gateway() -> AsyncIterator[httpx.AsyncClient]:
        async with served(bundle, file=file, states=str(tmp_path / "states")) as (app, http):
            await until(lambda: app.sharing.on)  # type: ignore[attr-defined]
            yield http

    async with gateway() as first, gateway() as second:
        answers = [await embed(http, ACME) for http in (first, second) * 3]
        assert sorted(each.status_code for each in answers) == [200, 200, 200, 200, 429, 429]
    async with gateway() as later:
        used = (await later.get("/v1/usage", headers=bearer(ACME))).json()
        assert (used["scope"], used["requests"]) == ("store", 4)


async def test_without_keys_there_is_no_usage(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        assert said(await http.get("/v1/usage")) == (404, "invalid_request_error", "not_found")
        assert not limits(await http.post("/v1/embeddings", json={"input": "cat"}))


async def test_series_by_tenant_are_bounded(bundle: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MOST_LABELLED", 1)
    write(file, entry(ACME, requests_per_minute=1), entry(GLOBEX, "globex"), entry("sk-third-0123456789", "third"))
    async with served(bundle, file=file, api_keys=(PLAIN,)) as (app, http):
        for key in (ACME, ACME, GLOBEX, "sk-third-0123456789", PLAIN):
            await embed(http, key)
        registry = app.state.catalog.metrics.registry

        def value(name: str, **labels: str) -> float | None:
            found: float | None = registry.get_sample_value(f"attnserve_tenant_{name}_total", labels)
            return found

        assert (value("requests", tenant="acme"), value("requests", tenant="other")) == (2, 3)
        assert (value("limited", tenant="acme"), value("limited", tenant="other")) == (1, 0)
        assert (value("tokens", tenant="acme", kind="prompt"), value("tokens", tenant="other", kind="prompt")) == (4, 12)
        assert value("requests", tenant="globex") is None
        app.keys._install(keys.read(write(file, entry(GLOBEX, "globex"))))
        await embed(http, GLOBEX)
        assert value("requests", tenant="acme") is None, "its series end with its keys"
        assert value("requests", tenant="globex") == 1


# Changes of the file ---------------------------------------------------------------------------------------------------------------------


def mounted(volume: Path, version: int, *entries: Any) -> Path:
    """As kubelet mounts a Secret, and as it changes it: keys.json -> ..data/keys.json, ..data -> a folder of the version."""
    write(volume / f"..{version}" / "keys.json", *entries)
    (volume / "..data.new").symlink_to(f"..{version}")
    (volume / "..data.new").replace(volume / "..data")
    if not (volume / "keys.json").is_symlink():
        (volume / "keys.json").symlink_to("..data/keys.json")
    return volume / "keys.json"


async def becomes(http: httpx.AsyncClient, key: str, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await embed(http, key)).status_code != status:  # noqa: ASYNC110  the answer is what is asked for
            await asyncio.sleep(0.001)


@pytest.mark.usefixtures("watchful")
async def test_a_mounted_secret_is_read_again_when_it_changes(bundle: Path, tmp_path: Path) -> None:
    volume = tmp_path / "secret"
    volume.mkdir()
    file = mounted(volume, 1, entry(ACME, requests_per_minute=1000))
    async with served(bundle, file=file) as (_, http):
        assert (await embed(http, ACME)).status_code == 200
        mounted(volume, 2, entry(ACME, requests_per_minute=2000), entry(GLOBEX, name="new", requests_per_minute=2000))
        await becomes(http, GLOBEX, 200)
        answer = await embed(http, ACME)
        assert (limits(answer)["limit-requests"], answer.status_code) == ("2000", 200)
        assert (await http.get("/v1/usage", headers=bearer(ACME))).json()["requests"] >= 3, "the tenant's counts go on"
        mounted(volume, 3, entry(GLOBEX, name="new", requests_per_minute=2000))
        await becomes(http, ACME, 401)
        assert (await embed(http, GLOBEX)).status_code == 200


def spoil(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


@pytest.mark.usefixtures("watchful")
@pytest.mark.parametrize("broken", [b"{", None])
async def test_a_broken_file_keeps_the_keys_and_says_so_once(
    bundle: Path, file: Path, caplog: pytest.LogCaptureFixture, broken: bytes | None
) -> None:
    logging.getLogger("attnserve").propagate = True
    async with served(bundle, file=write(file, entry(ACME))) as (_, http):
        spoil(file, broken)
        await until(lambda: any("stay as they were" in each.message for each in caplog.records))
        looks = 0
        while looks < 20:
            looks += 1
            await asyncio.sleep(0.001)
            assert (await embed(http, ACME)).status_code == 200
        told = [each for each in caplog.records if "stay as they were" in each.message]
        assert len(told) <= 2, "not at each look; twice where the file was written in two steps"
        assert told[0].levelno == logging.ERROR
        assert "keys.json" in told[0].error  # type: ignore[attr-defined]
        write(file, entry(GLOBEX))
        await becomes(http, GLOBEX, 200)
        assert (await embed(http, ACME)).status_code == 401


# Hostile files ---------------------------------------------------------------------------------------------------------------------------

SECRET = "sk-written-in-the-wrong-place"


def test_a_hostile_file_stops_the_start_and_is_not_quoted(file: Path) -> None:
    cases: list[Any] = [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "not a list of keys"),
        (b"[1]", "entry 0"),
        (b"[[]]", "entry 0"),
        ([{}], "entry 0.*`name`: Field required"),
        ([entry(ACME, name="")], "`name`"),
        ([entry(ACME, name="a\nb")], "`name`"),
        ([entry(ACME, tenant='a"} 1')], "`tenant`"),
        ([entry(ACME, tenant="other")], "name other is reserved"),
        ([{**entry(ACME), "sha256": SECRET}], "`sha256`"),
        ([{**entry(ACME), "sha256": "g" * 64}], "`sha256`"),
        ([{**entry(ACME), SECRET: 1}], "a field that is not known"),
        ([{**entry(ACME), "key": SECRET}], "a field that is not known"),
        ([entry(ACME, requests_per_minute=-1)], "`requests_per_minute`"),
        ([entry(ACME, tokens_per_second=1.5)], "`tokens_per_second`"),
        ([entry(ACME, tokens_per_second=10**400)], "`tokens_per_second`"),
        ([entry(ACME, streams=-5)], "`streams`"),
        ([entry(ACME, requests_per_minute=5, requests_per_second=1)], "one of the two"),
        ([entry(ACME), entry(ACME, name="b")], "has the sha256 of key ci"),
        ([entry(ACME), {**entry(ACME, name="b"), "sha256": entry(ACME)["sha256"].upper()}], "has the sha256 of key ci"),
        ([entry(ACME), entry(GLOBEX)], "is there twice"),
        ([entry(ACME), entry(GLOBEX, name="b", streams=1)], "has other limits than key ci"),
        ([entry(f"{number}", name=f"k{number}") for number in range(100_000)], "more than 8388608 bytes"),
    ]
    for content, told in cases:
        with case(content, told):
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
            with pytest.raises(SettingsError, match=told) as refused:
                keys.Keys(Settings(api_keys_file=file), Metrics())
            assert str(file) in str(refused.value)
            assert SECRET not in str(refused.value)
            assert len(str(refused.value)) < 600


def test_a_million_entries_are_not_read(file: Path) -> None:
    """Nor is what has no end."""
    file.parent.mkdir()
    with file.open("wb") as large:
        large.truncate(10**9)
    with pytest.raises(SettingsError, match="more than 8388608 bytes"):
        keys.read(file)
    with pytest.raises(SettingsError, match="not a file"):
        keys.read(Path("/dev/zero"))
    with pytest.raises(SettingsError, match="not a file"):
        keys.read(file.parent)
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        keys.read(file.parent / "nothing.json")


def test_nulls_are_absent(file: Path) -> None:
    (found,) = keys.read(write(file, entry(ACME, requests_per_minute=None, streams=None)))
    assert found.limits == (None, None, None)


# Settings and the command ----------------------------------------------------------------------------------------------------------------


def test_the_setting_keeps_links_and_an_empty_one_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a link leads to changes: it is followed at each look, not once."""
    file = mounted(tmp_path, 1, entry(ACME))
    monkeypatch.setenv("ATTNSERVE_API_KEYS_FILE", str(file))
    assert load({}).api_keys_file == file
    assert load({}).needs_key
    monkeypatch.chdir(tmp_path)
    assert load({"api_keys_file": "keys.json"}).api_keys_file == file
    monkeypatch.setenv("ATTNSERVE_API_KEYS_FILE", "")
    assert load({}).api_keys_file is None
    assert not load({}).needs_key


def test_the_command_makes_keys_that_open(file: Path) -> None:
    """Once printed, and in the file by its hash alone, which only its owner can read."""
    file.parent.mkdir()
    run = CliRunner().invoke
    arguments = ["key", "ci", "--tenant", "acme", "--requests-per-minute", "60"]
    made = [run(command, [*arguments, "--file", str(file)]), run(command, ["key", "ci", "--tenant", "globex", "--file", str(file)])]
    found = keys.read(file)
    assert [each.stdout for each in made] == [f"{key}\n" for key in (made[0].stdout.strip(), made[1].stdout.strip())]
    for each, kept in zip(made, found, strict=True):
        key = each.stdout.strip()
        assert kept.sha256 == hashlib.sha256(key.encode()).hexdigest()
        assert key not in file.read_text()
    assert found[0].requests_per_minute == 60
    assert file.stat().st_mode & 0o777 == 0o600
    key, written = run(command, arguments).stdout.splitlines()
    assert json.loads(written) == entry(key, requests_per_minute=60)
    before = file.read_bytes()
    for bad in (["key", "ci", "--tenant", "acme"], ["key", "a b", "--tenant", "acme"], ["key", "x", "--tenant", "acme", "--streams", "0"]):
        refused = run(command, [*bad, "--file", str(file)])
        assert isinstance(refused.exception, SettingsError)
    assert file.read_bytes() == before
