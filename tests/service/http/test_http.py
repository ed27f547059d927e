"""HTTP as clients send it: compressed bodies, HEAD, OPTIONS, slashes, methods and paths that there are not, browsers of other origins."""

import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from fastapi import Query

from service.dialects.routers import ROUTERS
from service.http import content_encoding, edge
from tests.service.fakes import case, client, fake_app, fake_bundle
from tests.service.generation_fakes import FakeGenerator, generator_app
from tests.service.http.test_edge import KEY, Caller, said

CONTENT = json.dumps({"input": "the cat"}).encode()
ORIGIN = "https://app.example"
_WIDE = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=24)).compressobj()
WIDE = _WIDE.compress(CONTENT) + _WIDE.flush()  # asks for a window of 16 MiB


def test_an_application_has_the_routes_themselves(bundle: Path) -> None:
    """Those that FastAPI includes are built again in each application, at the first request: tenths of a second on the event loop."""
    routes = fake_app(bundle).routes
    assert all(route in routes for router in ROUTERS for route in router.routes)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return fake_bundle(tmp_path / "mini")


def raw_deflate(content: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(content) + stream.flush()


async def post(http: httpx.AsyncClient, content: bytes, coding: str) -> httpx.Response:
    return await http.post("/v1/embeddings", content=content, headers={"content-encoding": coding})


# Compressed bodies -----------------------------------------------------------------------------------------------------------------------


async def test_a_compressed_body_is_the_body(bundle: Path) -> None:
    app = fake_app(bundle)
    async with client(app) as http:
        cases: list[Any] = [
            ("gzip", gzip.compress(CONTENT, mtime=0)),
            ("GZIP", gzip.compress(CONTENT, mtime=0)),
            ("x-gzip", gzip.compress(CONTENT, mtime=0)),
            ("gzip", gzip.compress(CONTENT[:5], mtime=0) + gzip.compress(b"", mtime=0) + gzip.compress(CONTENT[5:], mtime=0)),
            ("deflate", zlib.compress(CONTENT)),
            ("deflate", raw_deflate(CONTENT)),
            ("zstd", zstandard.compress(CONTENT)),
            ("zstd", zstandard.compress(CONTENT[:5]) + zstandard.compress(b"") + zstandard.compress(CONTENT[5:])),
            ("identity", CONTENT),
            (" identity ", CONTENT),
            ("", CONTENT),
        ]
        for coding, content in cases:
            with case(coding, content):
                plain, answer = await http.post("/v1/embeddings", content=CONTENT), await post(http, content, coding)
                assert (answer.status_code, answer.json()) == (200, plain.json())
                assert app.state.catalog.body_shares.used == 0


@pytest.mark.parametrize("body_bytes", [content_encoding._INLINE_BYTES - 1, content_encoding._INLINE_BYTES + 1, 3_000_000])
async def test_what_is_inflated_in_pieces_is_whole(body_bytes: int) -> None:
    """By the length of what is sent; random bytes do not shrink, so several pieces come out of the longest."""
    content = random.Random(0).randbytes(body_bytes)
    codings = {"gzip": gzip.compress(content, mtime=0), "deflate": raw_deflate(content), "zstd": zstandard.compress(content)}
    for coding, compressed in codings.items():
        pieces = [piece async for piece in content_encoding.inflate(coding, compressed)]
        assert b"".join(pieces) == content
        assert max(map(len, pieces)) <= content_encoding._PIECE_BYTES


async def test_a_bomb_is_413_and_is_inflated_no_further_than_the_limit(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inflated: list[int] = []
    inflate = content_encoding.inflate

    async def counted(coding: str, body: bytes) -> AsyncIterator[bytes]:
        async for piece in inflate(coding, body):
            inflated.append(len(piece))
            yield piece

    monkeypatch.setattr(edge, "inflate", counted)
    limit = 2 * 1024 * 1024
    app = fake_app(bundle, max_body_bytes=limit)
    async with client(app) as http:
        content = bytes(30_000_000)
        bombs = {"gzip": gzip.compress(content, 1), "deflate": zlib.compress(content, 1), "zstd": zstandard.compress(content)}
        for coding, bomb in bombs.items():
            assert len(bomb) < limit
            inflated.clear()
            refused = await post(http, bomb, coding)
            assert said(refused) == (413, "invalid_request_error", "body_too_large")
            assert str(limit) in refused.json()["error"]["message"]
            assert sum(inflated) <= limit + content_encoding._PIECE_BYTES
        assert app.state.catalog.body_shares.used == 0


async def test_what_is_inflated_counts_among_the_bodies_of_all_requests(bundle: Path) -> None:
    app = fake_app(bundle, max_body_bytes=2_000_000, max_pending_bytes=1_000_000)
    async with client(app) as http:
        refused = await post(http, gzip.compress(bytes(1_500_000)), "gzip")
        assert said(refused) == (429, "rate_limit_error", "overloaded")
        assert app.state.catalog.body_shares.used == 0


async def test_another_coding_is_415_that_names_those_that_are_taken(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        for coding in ["br", "compress", "gzip, gzip", "nonsense" * 100]:
            with case(coding):
                refused = await post(http, CONTENT, coding)
                assert said(refused) == (415, "invalid_request_error", "unsupported_content_encoding")
                assert "gzip, deflate, zstd" in refused.json()["error"]["message"]
                assert refused.headers["accept-encoding"] == "gzip, deflate, zstd"
                assert len(refused.content) < 500


async def test_a_body_that_is_not_what_its_coding_says_is_400(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        cases: list[Any] = [
            ("gzip", CONTENT),
            ("deflate", CONTENT),
            ("gzip", gzip.compress(CONTENT, mtime=0)[:-1]),
            ("gzip", gzip.compress(CONTENT, mtime=0)[:-8] + bytes(8)),
            ("gzip", gzip.compress(CONTENT, mtime=0) + b"more"),
            ("gzip", zlib.compress(CONTENT)),
            ("deflate", zlib.compress(CONTENT)[:-1]),
            ("deflate", zlib.compress(CONTENT) + b"more"),
            ("deflate", raw_deflate(CONTENT)[:-1]),
            ("gzip", gzip.compress(b"", mtime=0) * 100_000),
            ("zstd", CONTENT),
            ("zstd", zstandard.compress(CONTENT)[:-1]),
            ("zstd", zstandard.compress(CONTENT) + b"more"),
            ("zstd", WIDE),
        ]
        for coding, content in cases:
            with case(coding, content):
                assert said(await post(http, content, coding)) == (400, "invalid_request_error", "malformed_body")


# Compressed answers ----------------------------------------------------------------------------------------------------------------------

MANY = json.dumps({"input": ["cat"] * 100}).encode()


async def test_a_large_answer_has_the_best_coding_that_the_client_takes(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        cases: list[Any] = [
            ("gzip", "gzip"),
            ("gzip, deflate", "gzip"),
            ("gzip, deflate, br, zstd", "zstd"),
            ("gzip, zstd;q=0.5", "gzip"),
            ("GZIP;q=0.5, zstd;q=0", "gzip"),
            ("*", "zstd"),
            ("zstd;q=0, *;q=0.1", "gzip"),
            ("identity", None),
            ("br, deflate", None),
            ("gzip;q=0", None),
            ("", None),
        ]
        for accepted, coding in cases:
            with case(accepted, coding):
                plain = await http.post("/v1/embeddings", content=MANY, headers={"accept-encoding": ""})
                answer = await http.post("/v1/embeddings", content=MANY, headers={"accept-encoding": accepted})
                assert answer.headers.get("content-encoding") == coding
                assert answer.json() == plain.json()  # httpx decompresses
                assert {plain.headers["vary"], answer.headers["vary"]} == {"accept-encoding"}
                received = answer.num_bytes_downloaded
                assert (
                    received < len(plain.content) / 2 if coding else received == len(plain.content) == int(answer.headers["content-length"])
                )


async def test_an_answer_that_is_sent_in_pieces_is_compressed_in_pieces(bundle: Path) -> None:
    body = {"input": ["cat " + str(number) for number in range(2000)]}
    async with client(fake_app(bundle)) as http:
        for coding in ("gzip", "zstd"):
            answer = await http.post("/v1/embeddings", json=body, headers={"accept-encoding": coding})
            assert (answer.headers["content-encoding"], len(answer.json()["data"])) == (coding, 2000)


async def test_short_answers_and_streams_are_not_compressed(bundle: Path) -> None:
    """A compressor holds events back until it has enough of them."""
    async with client(fake_app(bundle)) as http:
        assert "content-encoding" not in (await http.post("/v1/embeddings", content=CONTENT)).headers
        streamed = await http.post("/v1/embeddings", content=MANY, headers={"accept": "application/x-ndjson"})
        assert ("content-encoding" in streamed.headers, len(streamed.content) > 16_384) == (False, True)
    async with client(generator_app(FakeGenerator("wordy"))) as http:
        events = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True})
        assert events.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in events.headers


# Methods and paths -----------------------------------------------------------------------------------------------------------------------


async def test_head_is_get_without_the_body(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        cases: list[Any] = [
            "/",
            "/v1/models",
            "/v1/models/mini",
            "/health/live",
            "/metrics",
            "/v2",
            "/v2/models/mini",
            "/info",
            "/docs",
            "/openapi.json",
        ]
        for path in cases:
            with case(path):
                got, head = await http.get(path), await http.head(path)
                assert (head.status_code, head.content) == (200, b"")
                volatile = ("x-request-id", "content-length" if path == "/metrics" else "x-request-id")
                assert {k: v for k, v in head.headers.items() if k not in volatile} == {
                    k: v for k, v in got.headers.items() if k not in volatile
                }


async def test_a_slash_at_the_end_changes_nothing_of_a_get(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        cases: list[Any] = ["/v1/models/", "/v1/models/mini/", "/health/ready/", "/docs/", "/v2/", "/v2/models/mini/ready/"]
        for path in cases:
            with case(path):
                plain, answer = await http.get(path[:-1]), await http.get(path, headers={"host": "elsewhere.example"})
                assert (answer.status_code, answer.content, "location" in answer.headers) == (200, plain.content, False)


async def test_nor_of_a_post(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        plain, answer = await http.post("/v1/embeddings", content=CONTENT), await http.post("/v1/embeddings/", content=CONTENT)
        assert (answer.status_code, answer.json()) == (200, plain.json())
        assert (await http.post("/embed/", json={"inputs": "cat"})).status_code == 200


async def test_allow_names_what_a_path_takes(bundle: Path) -> None:
    async with client(fake_app(bundle, api_keys=(KEY,))) as http:
        cases: list[Any] = [
            ("/v1/embeddings", "OPTIONS, POST"),
            ("/v1/models", "GET, HEAD, OPTIONS"),
            ("/v1/models/mini", "GET, HEAD, OPTIONS"),
            ("/v2/models/mini/infer", "OPTIONS, POST"),
            ("/decode", "OPTIONS, POST"),
            ("/", "GET, HEAD, OPTIONS, POST"),
            ("/docs", "GET, HEAD, OPTIONS"),
            ("/metrics", "GET, HEAD, OPTIONS"),
        ]
        for path, allow in cases:
            with case(path, allow):
                options = await http.options(path)
                assert (options.status_code, options.headers["allow"], options.content) == (204, allow, b"")
                assert options.headers["x-request-id"]
                for method in ("DELETE", "PUT", "TRACE", "CONNECT", "PROPFIND"):
                    refused = await http.request(method, path, headers={"authorization": f"Bearer {KEY}"})
                    assert (refused.status_code, refused.headers["allow"]) == (405, allow)
                    assert f"does not take {method}, only {allow}" in refused.text
                    assert refused.headers["content-type"] == "application/json"


ODD_PATHS = (
    "///",
    "//v1/models",
    "/v1//models",
    "/../etc/passwd",
    "/v1/\0",
    "/v1/\ufffd",
    "/v1/a\r\nb",
    "/" + "a" * 60_000,
    "/é",
    "*",
    "",
)


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
async def test_a_path_that_there_is_not_is_404_in_the_dialects_form(bundle: Path, method: str) -> None:
    app = fake_app(bundle)
    async with client(app):
        for path in ODD_PATHS:  # as the server has decoded them
            caller = Caller(app, path=path)
            caller.scope["method"] = method
            caller.body(b"{}")
            await caller.done()
            assert caller.status == 404, path
            assert set(caller.content["error"]) == {"message", "type", "param", "code"}
            assert len(str(caller.content)) < 500
            assert any(name == b"x-request-id" for name, _ in caller.sent[0]["headers"])


FORMS = {  # the fields of an error, for each dialect
    "/v1/embeddings": ["error"],
    "/v2/embed": ["message"],
    "/v2/rerank": ["message"],
    "/v1/rerank": ["detail", "message"],
    "/embed": ["error", "error_type"],
    "/decode": ["error", "error_type"],
    "/invocations": ["error", "error_type"],
    "/v2/models/mini/infer": ["error"],
}


async def test_errors_before_a_route_have_the_form_of_its_dialect(bundle: Path) -> None:
    key = {"authorization": "Bearer secret-key"}
    async with client(fake_app(bundle, api_keys=("secret-key",), max_body_bytes=1024)) as http:
        for path, form in FORMS.items():
            answers = [
                (401, await http.post(path, json={})),
                (400, await http.post(path, content=b"{", headers=key)),
                (400, await http.post(path, content=b'{"query": "\\ud800"}', headers=key)),
                (413, await http.post(path, content=b" " * 1025, headers=key)),
                (405, refused := await http.put(path, headers=key)),
            ]
            assert "POST" in refused.headers["allow"], path
            for status, answer in answers:
                assert (answer.status_code, sorted(answer.json())) == (status, form), (path, status)


async def test_errors_of_the_framework_in_routes_with_parameters_are_json_of_the_dialect(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routes with parameters in their path or query go through FastAPI, which has texts of its own for what goes wrong there."""
    app = fake_app(bundle)

    @app.get("/v1/number")
    async def number(value: int = Query()) -> int:
        return 1 // value

    async with client(app) as http:
        refused = await http.get("/v1/number?value=x", headers={"x-request-id": "me"})
        assert said(refused)[0] == 400
        assert refused.json()["error"]["param"] == "value"
        failed = await http.get("/v1/number?value=0", headers={"x-request-id": "me"})
        assert said(failed) == (500, "server_error", "internal_error")
        assert failed.headers["x-request-id"] == refused.headers["x-request-id"] == "me"


# Browsers of other origins ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origins", [(ORIGIN,), ("https://other.example", ORIGIN), ("*",)])
async def test_a_browser_may_ask_without_a_key_and_read_answers_and_errors(bundle: Path, origins: tuple[str, ...]) -> None:
    granted = "*" if origins == ("*",) else ORIGIN
    async with client(fake_app(bundle, api_keys=(KEY,), cors_origins=origins), headers={"origin": ORIGIN}) as http:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type,x-lane"}
        for path in ("/v1/embeddings", "/v1/nowhere"):
            preflight = await http.options(path, headers=asked)
            assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, granted)
            assert preflight.headers["access-control-allow-headers"] == "authorization,content-type,x-lane"
            assert "POST" in preflight.headers["access-control-allow-methods"]
            assert preflight.headers["x-request-id"]
        key = {"authorization": f"Bearer {KEY}"}
        answers = [
            await http.post("/v1/embeddings", content=CONTENT, headers=key),
            await http.post("/v1/embeddings", content=CONTENT),
            await http.post("/v1/embeddings", content=b"{", headers=key),
            await http.get("/v1/nowhere", headers=key),
            await http.get("/v1/embeddings", headers=key),
            await http.get("/v1/models/nobody", headers=key),
            await http.post("/embed", json={"inputs": "cat"}, headers={**key, "x-item-errors": "1"}),
        ]
        assert [answer.status_code for answer in answers] == [200, 401, 400, 404, 405, 404, 200]
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == granted
            assert answer.headers["access-control-expose-headers"] == "*"


async def test_a_browser_of_an_origin_that_is_not_named_gets_no_permission(bundle: Path) -> None:
    async with client(fake_app(bundle, cors_origins=("https://other.example",)), headers={"origin": ORIGIN}) as http:
        refused = await http.options("/embed", headers={"access-control-request-method": "POST"})
        assert (refused.status_code, refused.json()["error_type"]) == (403, "Validation")
        assert ORIGIN in refused.json()["error"]
        answer = await http.post("/embed", json={"inputs": "cat"})
        assert "access-control-allow-origin" not in {**refused.headers, **answer.headers}
