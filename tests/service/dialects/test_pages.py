"""What a browser opens: `/`, `/docs` and `/redoc`, without a request to any other origin."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from service.dialects import pages
from tests.service.fakes import client, fake_app, fake_bundle, serve_in_thread
from tests.service.http.test_edge import KEY

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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
        assert {"method": "POST", "path": "/v1/embeddings", "summary": "Embeddings"} in said["routes"]


async def test_a_person_is_shown_models_links_and_examples_that_work(bundles: list[Path]) -> None:
    async with client(fake_app(*bundles)) as http:
        answer = await http.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "host": "attn.example:8000"})
        assert answer.headers["content-type"].startswith("text/html")
        for path in ("/docs", "/redoc", "/openapi.json", "/metrics", "/health"):
            assert f'href="{path}"' in answer.text
            assert (await http.get(path)).status_code == 200
        for name in NAMES:
            assert f"<code>{name}</code>" in answer.text
        examples = re.findall(r"<pre>curl -s http://attn.example:8000(\S+) .*?-d '(.*?)'</pre>", html.unescape(answer.text), re.DOTALL)
        assert len(examples) == len(NAMES)
        for path, body in examples:
            assert (await http.post(path, json=json.loads(body))).status_code == 200, (path, body)
        assert "http" not in answer.text.replace("http://attn.example:8000", "")
        assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("host", ["<script>", "a b", "evil/../x", "a:b", ""])
async def test_a_host_header_that_is_no_host_is_not_shown(bundles: list[Path], host: str) -> None:
    async with client(fake_app(bundles[0])) as http:
        page = (await http.get("/", headers={"accept": "text/html", "host": host})).text
        assert "curl -s http://127.0.0.1:8000/v1/embeddings" in page
        assert "<script>" not in page


async def test_models_are_named_to_those_with_a_key_alone(bundles: list[Path]) -> None:
    async with client(fake_app(*bundles, api_keys=(KEY,))) as http:
        key = {"authorization": f"Bearer {KEY}"}
        for accept in ("application/json", "text/html"):
            told = await http.get("/", headers={"accept": accept})
            assert told.status_code == 200
            assert not [name for name in NAMES if re.search(rf"\b{name}\b", told.text)]
            assert "rank" in (await http.get("/", headers={"accept": accept, **key})).text
            assert (await http.get("/", headers={"accept": accept, "authorization": "Bearer wrong-key"})).status_code == 401
        assert (await http.post("/", json={"inputs": "cat"})).status_code == 401


@pytest.mark.parametrize("accept", ["application/json", "text/html"])
async def test_while_the_runtime_fails_it_says_so(bundles: list[Path], accept: str) -> None:
    app = fake_app(bundles[0])
    async with client(app) as http:
        app.state.catalog.session("enc").broken = True
        await http.post("/embed", json={"inputs": "a"})
        answer = await http.get("/", headers={"accept": accept})
        assert answer.status_code == 503
        assert "unhealthy" in answer.text or "Not ready" in answer.text


# Docs ------------------------------------------------------------------------------------------------------------------------------------


async def test_a_file_that_no_page_loads_is_not_there(bundles: list[Path]) -> None:
    async with client(fake_app(bundles[0])) as http:
        for path in ("/docs/README.md", "/docs/docs.html", "/docs/..%2fpages.py", "/docs/nothing.js"):
            assert (await http.get(path)).status_code == 404


async def test_every_file_is_there_with_its_type_and_its_licence(bundles: list[Path]) -> None:
    async with client(fake_app(bundles[0])) as http:
        for name, media_type in pages._FILES.items():
            answer = await http.get(f"/docs/{name}")
            assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
    listed = (pages._ASSETS / "README.md").read_text()
    assert {path.name for path in pages._ASSETS.iterdir() if path.name != "README.md"} == set(re.findall(r"`([\w.-]+\.\w+)`", listed)) - {
        "README.md"
    }


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not here (apt-get install chromium)")
@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/docs", ["/v1/embeddings", "/v2/models/{model}/infer", "Authorize", "attnserve"]),
        ("/redoc", ["/v1/embeddings", "/v1/chat/completions", "attnserve"]),
        ("/", ["curl -s http://127.0.0.1:"]),
    ],
)
def test_chromium_shows_the_routes_and_asks_no_other_origin(bundles: list[Path], tmp_path: Path, path: str, shown: list[str]) -> None:
    """Every request of the page is in the browser's log of the network, also one to what cannot be reached."""
    assert CHROMIUM is not None
    log = tmp_path / "net.json"
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    more = ["--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", "--virtual-time-budget=20000"]
    with serve_in_thread(fake_app(*bundles, api_keys=(KEY,))) as url:
        command = [CHROMIUM, *flags.split(), *more, "--dump-dom", f"{url}{path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    page = html.unescape(re.sub(r"<wbr>|\u200b", "", done.stdout))  # Swagger UI lets long paths be broken
    for text in shown:
        assert text in re.sub(r"<[^>]*>", "", page), done.stderr[-2000:]
    requests = [event["params"] for event in json.loads(log.read_text())["events"] if "initiator" in event.get("params", {})]
    asked = {request["url"] for request in requests if request["initiator"] == url}  # the browser has business of its own besides
    assert [request for request in asked if not request.startswith((f"{url}/", "data:", "blob:"))] == []
    assert (f"{url}/openapi.json" in asked) == (path != "/")
    assert not re.search(r'(?:src|href)="https?://(?!127\.0\.0\.1)[^"]*\.(?:js|css|svg|png|woff2?)', page)
