"""Listing, reading, changing, deleting and forking states."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from service.dialects.states import routes
from service.states.engine import StateEngine
from service.states.record import NameChange
from tests.service.dialects.states.conftest import ALICE, NO_STATE, States
from tests.service.fakes import case, client
from tests.service.generation_fakes import FakeGenerator, generator_app

pytestmark = pytest.mark.asyncio


async def test_a_state_is_described(states: States) -> None:
    before = int(time.time())
    made = await states.make("Hello", metadata={"topic": "greetings"}, ttl_s=60, pin=True, name="doc")
    assert made == {
        "object": "state",
        "id": made["id"],
        "model": "wordy",
        "position": 6,  # <s> and a token a letter
        "bytes": {"logical": (size := made["bytes"]["logical"]), "physical": size},
        "fingerprint": states.model.manifest.fingerprint,
        "numerics": "fa4e",
        "parent": None,
        "origin": "prompt",
        "response": None,
        "turn": "",
        "names": [{"name": "doc", "version": 1}],
        "created": made["created"],
        "expires": made["expires"],
        "pinned": True,
        "metadata": {"topic": "greetings"},
        "usage": {"prompt_tokens": 6, "cached_tokens": 0},
        "exact": True,
    }
    assert before <= made["created"] <= time.time()
    assert made["expires"] - made["created"] in (60, 61)
    told = {name: value for name, value in made.items() if name not in ("usage", "exact")}
    assert await states.done("GET", f"/{made['id']}") == await states.done("GET", "/doc") == told


async def test_states_are_listed_in_pages_newest_first(states: States) -> None:
    made = [(await states.make(f"text {number}"))["id"] for number in range(5)][::-1]
    first = await states.done("GET", "?limit=2")
    assert [each["id"] for each in first["data"]] == made[:2]
    assert (first["object"], first["first_id"], first["last_id"], first["has_more"]) == ("list", made[0], made[1], True)
    rest = await states.done("GET", f"?limit=3&after={first['last_id']}")
    assert [each["id"] for each in rest["data"]] == made[2:]
    assert rest["has_more"] is False
    assert await states.done("GET", f"?after={made[-1]}") == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    missing = [await states.refused(404, "GET", f"?after={after}") for after in (NO_STATE, "x", "%00")]
    assert missing[0] == missing[1] == missing[2]
    for limit in ("0", "101", "many"):
        error = await states.refused(400, "GET", f"?limit={limit}")
        assert (error["param"], error["message"].endswith(f". Given: '{limit}'")) == ("limit", True)


async def test_an_unknown_query_parameter_is_refused_with_the_known_ones(states: States) -> None:
    error = await states.refused(400, "GET", "?nmae=x")
    assert (error["param"], error["message"]) == (
        "nmae",
        "unknown query parameter `nmae`: this route takes after, limit, metadata, model, name, origin",
    )
    assert (await states.refused(400, "GET", "?limit[]=1"))["param"] == "limit[]"
    assert (await states.done("GET", "?api-version=2025-01-01&metadata[a]=b"))["data"] == []


async def test_states_are_filtered(states: States) -> None:
    a = (await states.make(metadata={"topic": "a", "x[y]": 'z"'}, name="first"))["id"]
    await states.make(metadata={"topic": "b"})

    async def found(query: str) -> list[str]:
        return [each["id"] for each in (await states.done("GET", query))["data"]]

    assert await found("?metadata[topic]=a") == await found("?name=first") == await found("?metadata[x[y]]=z%22&metadata[topic]=a") == [a]
    assert await found("?metadata[topic]=a&metadata[x[y]]=") == await found("?model=other") == await found("?name=a%00b") == []
    many = "&".join(f"metadata[{number}]=x" for number in range(17))
    assert "17 pairs" in (await states.refused(400, "GET", f"?{many}"))["message"]


async def test_what_is_missing_foreign_or_malformed_is_refused_alike(keyed: tuple[States, States]) -> None:
    mine, other = keyed
    made = (await mine.make(name="doc", headers={"idempotency-key": "k"}))["id"]
    answers = []
    for reference in (made, "doc", NO_STATE, "state_1", "%00", "%F0%9F%98%80", "x" * 300):
        for method, path, json in [
            ("GET", "", None),
            ("PATCH", "", {"pin": True}),
            ("DELETE", "", None),
            ("POST", "/fork", {}),
            ("POST", "/rewind", {"tokens": 1}),
            ("GET", "/lineage", None),
            ("GET", "/blob", None),
        ]:
            answers.append(await other.refused(404, method, f"/{reference}{path}", json))
    assert all(answer == answers[0] for answer in answers)
    for body in ({"prompt": "x", "parent": made}, {"prompt": "x", "parent": "doc"}, {"prompt": "x", "parent": NO_STATE}):
        assert await other.refused(404, "POST", "", body) == answers[0] | {"param": "parent"}
    assert (await other.done("GET"))["data"] == []
    fresh = await other.ask("POST", "", {"prompt": "Hello", "name": "doc"}, headers={"idempotency-key": "k"})
    assert "idempotent-replayed" not in fresh.headers
    assert fresh.json()["id"] != made
    assert (await mine.done("GET", "/doc"))["id"] == made


async def test_a_name_moves_by_compare_and_set(states: States) -> None:
    first, second = (await states.make("1", name="head"))["id"], (await states.make("2"))["id"]
    answer = await states.ask("GET", "/head")
    assert answer.headers["etag"] == '"v1"'
    assert "etag" not in (await states.ask("GET", f"/{first}")).headers
    moved = await states.ask("PATCH", f"/{second}", {"name": "head"}, headers={"if-match": '"v1"'})
    assert (moved.status_code, moved.headers["etag"]) == (200, '"v2"')
    assert (await states.done("GET", "/head"))["id"] == second
    for header in ({"if-match": '"v1"'}, {"if-none-match": "*"}):
        assert (await states.refused(412, "PATCH", f"/{first}", {"name": "head", "pin": True}, headers=header))["code"] == (
            "precondition_failed"
        )
    assert (await states.done("GET", f"/{first}"))["pinned"] is False
    assert (await states.refused(412, "PATCH", f"/{first}", {"name": "new"}, headers={"if-match": "*"}))["param"] == "name"
    assert (await states.ask("PATCH", f"/{first}", {"name": "new"}, headers={"if-none-match": "*"})).headers["etag"] == '"v1"'
    for header in ({"if-match": "v1"}, {"if-match": 'W/"v1"'}, {"if-none-match": '"v1"'}, {"if-match": '"v1"', "if-none-match": "*"}):
        await states.refused(400, "PATCH", f"/{first}", {"name": "head"}, headers=header)
    await states.refused(400, "PATCH", f"/{first}", {}, headers={"if-match": '"v1"'})
    error = await states.refused(400, "DELETE", f"/{first}", headers={"if-match": '"v1"'})
    assert (error["param"], "send the name instead" in error["message"]) == ("If-Match", True)


async def test_a_version_guards_changes_by_the_name_in_the_path(states: States) -> None:
    await states.make(name="head")
    stale, now = {"if-match": '"v9"'}, {"if-match": '"v1"'}
    for method, body in (("PATCH", {"pin": True}), ("DELETE", None)):
        await states.refused(412, method, "/head", body, headers=stale)
    assert (await states.done("PATCH", "/head", {"pin": True}, headers=now))["names"] == [{"name": "head", "version": 1}]
    await states.done("DELETE", "/head", headers=now)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("PATCH", "", {"pin": True}), ("PATCH", "", {"pin": True, "name": "head"}), ("DELETE", "", None), ("POST", "/fork", {"name": "head"})],
)
async def test_a_name_that_moves_after_it_was_looked_up_fails_the_change(
    states: States, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    """Another process moves it between two calls of the store, so the call that writes has to compare the version."""
    first, other = await states.make("first", name="head"), await states.make("other")
    before = await states.done("GET", f"/{first['id']}")
    looked_up = routes.change_of

    def raced(engine: StateEngine, *arguments: Any) -> NameChange | None:
        change = looked_up(engine, *arguments)
        engine.move("", NameChange("head"), other["id"])
        return change

    with monkeypatch.context() as patch:
        patch.setattr(routes, "change_of", raced)
        await states.refused(412, method, f"/head{path}", body, headers={"if-match": '"v1"'})
    assert await states.done("GET", f"/{first['id']}") == before
    assert {each["id"] for each in (await states.done("GET"))["data"]} == {first["id"], other["id"]}


async def test_bad_names_are_refused(states: States) -> None:
    cases: list[Any] = ["state_1", "a/b", "", "x" * 129, ".hidden", "a b", "ä", "a\n"]
    for name in cases:
        with case(name):
            error = await states.refused(400, "POST", "", {"prompt": "x", "name": name})
            assert error["param"] == "name"


async def test_a_state_is_changed(states: States) -> None:
    made = (await states.make(metadata={"a": "1"}))["id"]
    changed = await states.done("PATCH", f"/{made}", {"ttl_s": 10, "pin": True, "metadata": {"b": "2"}})
    assert 8 <= changed["expires"] - time.time() <= 11
    assert (changed["pinned"], changed["metadata"]) == (True, {"b": "2"})
    assert (await states.done("PATCH", f"/{made}", {"ttl_s": "never", "pin": None})) == changed | {"expires": None}
    for bad in (
        {"ttl_s": 0.5},
        {"ttl_s": "soon"},
        {"metadata": {"a": 1}},
        {"metadata": {str(at): "" for at in range(17)}},
        {"pinned": True},
    ):
        await states.refused(400, "PATCH", f"/{made}", bad)


async def test_a_deleted_state_is_missing_and_an_expired_one_gone(states: States) -> None:
    kept = await states.make("kept")
    made = await states.make(parent=kept["id"], name="doc")
    assert await states.done("DELETE", "/doc") == {"id": made["id"], "object": "state.deleted", "deleted": True}
    for reference in (made["id"], "doc"):
        await states.refused(404, "GET", f"/{reference}")
    assert [each["id"] for each in (await states.done("GET"))["data"]] == [kept["id"]]
    states.later(86_400 * 31)
    gone = await states.refused(410, "GET", f"/{kept['id']}")
    assert "it has expired" in gone["message"]


async def test_a_service_whose_store_was_taken_away_acknowledges_nothing_and_is_not_ready(tmp_path: Path) -> None:
    model = FakeGenerator("wordy")
    async with client(generator_app(model, states=str(tmp_path))) as http:
        states = States(http, model)
        made = await states.make()
        (tmp_path / "states.sqlite3").rename(tmp_path / "aside")
        for answer in (await states.ask("POST", json={"prompt": "Hello"}), await states.ask("GET", f"/{made['id']}")):
            assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "store_failed", "5")
        ready = await http.get("/health/ready")
        assert (ready.status_code, "states.sqlite3 of the store of states was deleted or replaced" in ready.text) == (503, True)
        (tmp_path / "aside").rename(tmp_path / "states.sqlite3")
        assert (await http.get("/health/ready")).status_code == 200
        assert await states.make()


async def test_forks_share_one_blob(states: States) -> None:
    parent = await states.make("Hello")
    fork = await states.done("POST", f"/{parent['id']}/fork", {"name": "copy", "metadata": {"a": "b"}})
    assert (fork["parent"], fork["origin"], fork["position"], fork["names"]) == (parent["id"], "fork", 6, [{"name": "copy", "version": 1}])
    assert fork["bytes"] == {"logical": (size := parent["bytes"]["logical"]), "physical": round(size / 2)}
    assert isinstance(fork["bytes"]["physical"], int)
    assert await states.text("copy") == "<s>Hello"
    many = await states.done("POST", "/copy/fork", {"n": 3})
    assert len({each["id"] for each in many["data"]}) == 3
    assert all(each["parent"] == fork["id"] for each in many["data"])
    assert (await states.done("POST", "/copy/fork"))["parent"] == fork["id"]  # a body is not needed
    await states.refused(400, "POST", "/copy/fork", {"n": 101})
    await states.refused(400, "POST", "/copy/fork", {"n": 2, "name": "both"})


async def test_a_lineage_is_read_in_pages(states: States) -> None:
    first = await states.make("a")
    second = await states.make("bc", parent=first["id"])
    third = await states.done("POST", f"/{second['id']}/fork", {"name": "leaf"})
    await states.done("DELETE", f"/{second['id']}")
    line = await states.done("GET", "/leaf/lineage")
    told = [(each["id"], each["status"], each["tokens"], each["position"]) for each in line["data"]]
    assert told == [(third["id"], "ready", 0, 4), (second["id"], "deleted", 2, 4), (first["id"], "ready", 2, 2)]
    assert line["data"][1]["bytes"]["physical"] == 0
    page = await states.done("GET", "/leaf/lineage?limit=1")
    assert (page["last_id"], page["has_more"]) == (third["id"], True)
    page = await states.done("GET", f"/leaf/lineage?limit=1&after={second['id']}")
    assert ([each["id"] for each in page["data"]], page["has_more"]) == ([first["id"]], False)
    await states.refused(404, "GET", f"/leaf/lineage?after={NO_STATE}")


async def test_a_quota_is_per_tenant() -> None:
    model = FakeGenerator("wordy")
    async with client(generator_app(model, max_states=3)) as http:
        states = States(http, model)
        made = [(await states.make(str(number)))["id"] for number in range(4)]
        gone = await states.refused(410, "GET", f"/{made[0]}")
        assert "evicted" in gone["message"]
        await states.done("PATCH", f"/{made[1]}", {"pin": True})
        forks = await states.done("POST", f"/{made[1]}/fork", {"n": 2, "pin": True})
        assert len(forks["data"]) == 2
        error = await states.refused(403, "POST", "", {"prompt": "x"})
        assert error["code"] == "state_quota_exceeded"
        await states.refused(403, "POST", f"/{made[1]}/fork", {"n": 3})


async def test_a_metric_has_no_id(states: States) -> None:
    made = await states.make(name="secretname")
    await states.done("GET", f"/{made['id']}")
    await states.done("GET", "/secretname")
    metrics = (await states.http.get("/metrics")).text
    assert "/v1/states/{state}" in metrics
    assert made["id"] not in metrics
    assert "secretname" not in metrics


async def test_a_service_without_decoders_has_no_states(tmp_path: Any) -> None:
    from tests.service.fakes import fake_app, fake_bundle

    async with client(fake_app(fake_bundle(tmp_path / "mini"))) as http:
        answer = await http.get("/v1/states")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_names_and_ids_are_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the request is refused before it has a route."""
    caplog.set_level(logging.DEBUG, "attnserve")
    paths = {
        "/v1/states/private": "/v1/states/{state}",
        "/v1/states/private/lineage": "/v1/states/{state}/lineage",
        "/v1/states/private/nonsense": "/v1/states/...",
        "/v1/responses/private": "/v1/responses/{response_id}",
        "/v1/responses/private/input_items": "/v1/responses/{response_id}/input_items",
        "/v1/stream/private": "/v1/stream/{run}",
        "/v1/nonsense/a": "/v1/nonsense/a",
    }
    async with client(generator_app(FakeGenerator("wordy"), api_keys=(ALICE,), access_log=True)) as http:
        for path, logged in paths.items():
            caplog.clear()
            assert (await http.get(path, headers={"authorization": f"Bearer {ALICE}"})).status_code == 404
            assert (await http.get(path)).status_code == 401
            found, early = [record.__dict__ for record in caplog.records if record.message == "request"]
            assert found["path"] == logged
            assert early["path"] == (path if "nonsense/a" in path else logged[: logged.index("/", 4)] + "/..."), path
            assert "private" not in "".join(str(record.__dict__) for record in caplog.records)
