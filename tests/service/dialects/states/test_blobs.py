"""The bytes of a state, read and put back."""

import hashlib
import time
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from service.states.blob import Blob, pack
from service.states.record import new_state_id
from tests.service.dialects.states.conftest import States
from tests.service.generation_fakes import FakeGenerator
from tests.service.scripted_engine import MOST_SEEN, STATES

pytestmark = pytest.mark.asyncio
FORM = "application/octet-stream"


def blob_of(model: FakeGenerator, **fields: Any) -> bytes:
    """A state of the model after the tokens 10, 11, 12."""
    vocab_size, seen = model.manifest.limits.vocab_size, np.zeros((model.manifest.limits.vocab_size + 7) // 8, np.uint8)
    seen[1] = 0b11100
    blob = Blob(
        tensors=(np.arange(8, dtype=np.float32).reshape(2, 4), np.array([0] * (MOST_SEEN - 3) + [11, 12, 13])),
        logits=np.zeros(vocab_size, np.float32),
        seen=seen,
        recent=(10, 11, 12),
        position=3,
        model=model.name,
        fingerprint=model.manifest.fingerprint,
        numerics="fa4e",
        id=new_state_id(),
        parent=None,
        created=time.time(),
    )
    return pack(replace(blob, **fields), [state.name for state in STATES])


async def put(states: States, content: bytes, query: str = "", **headers: str) -> httpx.Response:
    return await states.http.put(f"/v1/states/blob{query}", content=content, headers={"content-type": FORM, **headers})


async def test_a_blob_is_read(states: States) -> None:
    made = await states.make("Hello", name="doc")
    answer = await states.ask("GET", "/doc/blob")
    assert (answer.status_code, answer.headers["content-type"], answer.headers["accept-ranges"]) == (200, FORM, "bytes")
    assert len(answer.content) == made["bytes"]["logical"]
    assert answer.headers["etag"] == f'"{hashlib.sha256(answer.content).hexdigest()}"'
    fork = await states.done("POST", "/doc/fork")
    assert (await states.ask("GET", f"/{fork['id']}/blob")).headers["etag"] == answer.headers["etag"]
    head = await states.ask("HEAD", "/doc/blob")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", answer.headers["etag"])
    assert head.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("bytes=0-3", slice(0, 4)),
        ("bytes=20-", slice(20, None)),
        ("bytes=-5", slice(-5, None)),
        ("bytes=4-99999", slice(4, None)),
        ("bytes=-99999", slice(0, None)),
    ],
)
async def test_a_part_of_a_blob_is_read(states: States, header: str, part: slice) -> None:
    made = await states.make("Hello")
    whole = await states.ask("GET", f"/{made['id']}/blob")
    answer = await states.ask("GET", f"/{made['id']}/blob", headers={"range": header})
    assert (answer.status_code, answer.content) == (206, whole.content[part])
    size = len(whole.content)
    begin, end, _ = part.indices(size)
    assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/{size}"
    assert answer.headers["etag"] == whole.headers["etag"]
    for condition, status in ((whole.headers["etag"], 206), ('"other"', 200)):
        answer = await states.ask("GET", f"/{made['id']}/blob", headers={"range": header, "if-range": condition})
        assert answer.status_code == status


async def test_a_range_outside_is_refused_and_a_strange_one_ignored(states: States) -> None:
    made = await states.make("Hello")
    size = made["bytes"]["logical"]
    for header in (f"bytes={size}-", "bytes=99999-100000", "bytes=-0"):
        answer = await states.ask("GET", f"/{made['id']}/blob", headers={"range": header})
        assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{size}")
        assert answer.json()["error"]["code"] == "range_not_satisfiable"
    for header in ("bytes=5-4", "bytes=-", "bytes=0-1,3-4", "lines=0-1", "bytes=a-b"):
        answer = await states.ask("GET", f"/{made['id']}/blob", headers={"range": header})
        assert (answer.status_code, len(answer.content)) == (200, size)


async def test_bytes_that_the_client_has_are_not_sent(states: States) -> None:
    made = await states.make("Hello")
    etag = (await states.ask("GET", f"/{made['id']}/blob")).headers["etag"]
    for header in (etag, f'"x", {etag}', "*", f"W/{etag}"):
        answer = await states.ask("GET", f"/{made['id']}/blob", headers={"if-none-match": header})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag)
    assert (await states.ask("GET", f"/{made['id']}/blob", headers={"if-none-match": '"x"'})).status_code == 200


async def test_a_blob_is_put_back(states: States) -> None:
    content = blob_of(states.model, position=100)
    answer = await put(states, content, "?name=doc&ttl_s=60&pin=true&metadata[from]=elsewhere")
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert (made["position"], made["numerics"], made["origin"], made["parent"]) == (100, "fa4e", "upload", None)
    assert (made["names"], made["pinned"], made["metadata"]) == ([{"name": "doc", "version": 1}], True, {"from": "elsewhere"})
    assert made["expires"] - made["created"] in (60, 61)
    assert (await states.ask("GET", "/doc/blob")).content == content
    child = await states.make("more", parent="doc")
    assert child["position"] == 104
    back = await states.done("POST", f"/{child['id']}/rewind", {"tokens": 1})
    assert (back["position"], back["parent"]) == (103, made["id"])
    error = await states.refused(400, "POST", "/doc/rewind", {"to": 98})
    assert "those before 97 are not" in error["message"]


async def test_a_blob_is_put_once(states: States) -> None:
    content = blob_of(states.model)
    first = await put(states, content, **{"idempotency-key": "k"})
    again = await put(states, content, **{"idempotency-key": "k"})
    assert (first.json()["id"], again.headers["idempotent-replayed"]) == (again.json()["id"], "true")
    other = await put(states, content, "?pin=true", **{"idempotency-key": "k"})
    assert (other.status_code, other.headers["x-should-retry"]) == (409, "false")


async def test_what_is_no_state_of_a_model_here_is_refused_and_nothing_written(states: States) -> None:
    whole = blob_of(states.model)
    foreign = blob_of(states.model, fingerprint="other")
    for content in (b"", whole[:-1], whole + b"x", foreign):
        answer = await put(states, content, "?name=doc")
        assert answer.status_code == 400, content
        assert len(answer.json()["error"]["message"]) > 40
    assert "is not served here" in (await put(states, foreign)).json()["error"]["message"]
    form = await states.http.put("/v1/states/blob", files={"file": whole})
    assert (form.status_code, "--data-binary" in form.json()["error"]["message"]) == (400, True)
    for query in ("?name=a%20b", "?ttl_s=soon", "?ttl_s=nan", "?pin=perhaps", "?metadata[a]=" + "x" * 513):
        assert (await put(states, whole, query)).status_code == 400, query
    assert (await put(states, whole, "?name=doc", **{"if-match": '"v1"'})).status_code == 412
    assert (await states.done("GET"))["data"] == []


async def test_an_upload_is_the_tenants_own(keyed: tuple[States, States]) -> None:
    mine, other = keyed
    made = (await put(mine, blob_of(mine.model), "?name=doc")).json()
    await other.refused(404, "GET", f"/{made['id']}/blob")
    same = (await put(other, blob_of(other.model))).json()
    assert same["bytes"] == made["bytes"]  # nothing tells that another tenant has the same bytes
