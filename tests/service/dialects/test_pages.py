"""What a browser opens: `/`, `/docs` and `/redoc`, without a request to any other origin."""

import gzip
import re
import time
from pathlib import Path

import pytest

from service.dialects import pages
from service.http.content_encoding import LEAST_BYTES
from service.telemetry.history import KEPT
from tests.service.fakes import client, fake_app, fake_bundle
from tests.service.http.test_edge import KEY

NAMES = {"enc": "encoder", "rank": "reranker", "class": "classifier", "tags": "token_classifier"}


@pytest.fixture
def bundles(tmp_path: Path) -> list[Path]:
    return [fake_bundle(tmp_path / name, kind) for name, kind in NAMES.items()]  # type: ignore[arg-type]


# The first page --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [None, "*/*", "application/json"])
async def test_a_program_is_told_version_models_and_routes(bundles: list[Path], accept: str | None) -> None:
    async with client(fake_app(*bundles, aliases={"ada": "enc"})) as http:
        answer = await http.get("/", headers={"accept": accept} if accept else {})
        said = answer.json()
        assert (said["name"], said["docs"]) == ("attnserve", "/docs")
        assert said["models"] == [{"name": name, "kind": kind} for name, kind in {**NAMES, "ada": "encoder"}.items()]
        assert {"method": "POST", "path": "/v1/embeddings", "summary": "Return a vector for each input"} in said["routes"]


async def test_a_browser_gets_the_console_with_a_policy_that_forbids_inline_scripts_and_other_origins(bundles: list[Path]) -> None:
    async with client(fake_app(*bundles)) as http:
        answer = await http.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert not re.search(r"<style|style=|<script[^>]*>[^<]|\son\w+=", answer.text)
        files = re.findall(r'(?:src|href)="(/console/[^"]+)"', answer.text)
        assert {Path(name).suffix for name in files} == {".js", ".css", ".svg"}
        for name in files:
            file = await http.get(name)
            assert ("content-encoding" in file.headers) == (len(file.content) >= LEAST_BYTES)
            assert file.headers["content-security-policy"] == answer.headers["content-security-policy"]
            again = await http.get(name, headers={"if-none-match": file.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")


async def test_without_the_console_a_browser_gets_json_and_no_files(bundles: list[Path]) -> None:
    async with client(fake_app(*bundles, console=False)) as http:
        assert (await http.get("/", headers={"accept": "text/html"})).json()["name"] == "attnserve"
        assert (await http.get("/console/console.js")).status_code == 404


async def test_the_console_needs_no_key_and_has_no_other_files(bundles: list[Path]) -> None:
    async with client(fake_app(*bundles, api_keys=(KEY,))) as http:
        assert (await http.get("/console/console.js")).status_code == 200
        for name in ("nothing.js", "..%2f__init__.py", "source"):
            assert (await http.get(f"/console/{name}")).status_code == 404


def test_the_console_is_at_most_300_kb_compressed() -> None:
    assert sum(len(gzip.compress(file.read_bytes(), 1)) for file in pages._CONSOLE.iterdir()) <= 300_000


async def test_routes_for_development_are_listed_in_development_alone(bundles: list[Path]) -> None:
    for development in (False, True):
        async with client(fake_app(bundles[0], development=development)) as http:
            assert ("/v1/development/kill" in {route["path"] for route in (await http.get("/")).json()["routes"]}) == development
            document = (await http.get("/openapi.json")).json()
            assert ("/v1/development/kill" in document["paths"], "Killed" in document["components"]["schemas"]) == (
                development,
                development,
            )


async def test_the_console_gets_the_metrics_of_the_last_minute(bundles: list[Path]) -> None:
    app = fake_app(bundles[0])
    async with client(app) as http:
        await http.post("/embed", json={"inputs": "a"})
        for ago_s in range(5 * KEPT, 0, -5):
            app.history.record(time.monotonic() - ago_s)
        kept = (await http.get("/console/history")).json()
        assert len(kept) == KEPT
        assert kept[0]["age_s"] > kept[-1]["age_s"] >= 5
        assert 'te_request_count{method="/embed",model="enc"} 1.0' in kept[-1]["metrics"]


async def test_processes_are_killed_in_development_alone(bundles: list[Path]) -> None:
    async with client(fake_app(*bundles)) as http:
        answer = await http.post("/v1/development/kill")
        assert answer.status_code == 404
        assert "--development" in answer.json()["error"]["message"]


async def test_models_are_named_to_those_with_a_key_alone(bundles: list[Path]) -> None:
    async with client(fake_app(*bundles, api_keys=(KEY,))) as http:
        key = {"authorization": f"Bearer {KEY}"}
        told = (await http.get("/")).json()
        assert (told["models"], told["processes"]) == (None, None)
        assert [model["name"] for model in (await http.get("/", headers=key)).json()["models"]] == list(NAMES)
        assert (await http.get("/", headers={"authorization": "Bearer wrong-key"})).status_code == 401
        assert (await http.post("/", json={"inputs": "cat"})).status_code == 401


# Docs ------------------------------------------------------------------------------------------------------------------------------------


async def test_a_file_that_no_page_loads_is_not_there(bundles: list[Path]) -> None:
    async with client(fake_app(bundles[0])) as http:
        for path in ("/docs/README.md", "/docs/docs.html", "/docs/..%2fpages.py", "/docs/nothing.js"):
            assert (await http.get(path)).status_code == 404


async def test_every_file_is_there_with_its_type_and_its_licence(bundles: list[Path]) -> None:
    async with client(fake_app(bundles[0])) as http:
        for file in pages._ASSETS.iterdir():
            if (media_type := {".js": "text/javascript", ".css": "text/css"}.get(file.suffix)) is not None:
                answer = await http.get(f"/docs/{file.name}")
                assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
    listed = (pages._ASSETS / "README.md").read_text()
    assert {path.name for path in pages._ASSETS.iterdir() if path.name != "README.md"} == set(re.findall(r"`([\w.-]+\.\w+)`", listed)) - {
        "README.md"
    }
