"""States that a model computes: what it is asked for, what is kept, and what a repeated request gets."""

import asyncio
from typing import Any

import pytest

from service.errors import Overloaded
from tests.service.dialects.states.conftest import NO_STATE, States
from tests.service.generation_fakes import BOS

pytestmark = pytest.mark.asyncio
SAYS = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("body", "text", "turn"),
    [
        ({"prompt": "Hello"}, "<s>Hello", ""),
        ({"token_ids": [BOS, 10, 11]}, None, ""),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "<s><system>Be brief.\n", "system"),
        ({"messages": [SAYS]}, "<s><user>Hi\n", "user"),
        ({"messages": [SAYS, {"role": "assistant", "content": "Ho"}]}, "<s><user>Hi\n<assistant>Ho\n", "assistant"),
    ],
)
async def test_a_state_is_made_from_text_ids_or_messages(states: States, body: dict[str, Any], text: str | None, turn: str) -> None:
    made = await states.done("POST", "", body)
    assert (made["turn"], made["origin"]) == (turn, "prompt")
    assert text is None or await states.text(made["id"]) == text
    assert made["position"] == len(states.engine.requests[0].prompt)


async def test_a_parent_is_continued_without_special_tokens(states: States) -> None:
    parent = await states.make("Hello", name="doc")
    child = await states.make(" world", parent="doc", name="doc")
    assert (child["parent"], child["origin"], child["position"]) == (parent["id"], "continuation", 12)
    assert child["names"] == [{"name": "doc", "version": 2}]
    assert await states.text("doc") == "<s>Hello world"
    request = states.engine.requests[-1]
    assert request.start is not None
    assert (request.start.id, request.start.exact) == (parent["id"], True)
    await states.make("!", parent="doc", exact="best_effort")
    assert states.engine.requests[-1].start == ("", child["id"], False, child["position"])
    more = await states.done("POST", "", {"parent": child["id"], "token_ids": [10]})
    assert more["position"] == 13


async def test_each_tenant_finds_only_its_own_prompts_in_the_cache(keyed: tuple[States, States]) -> None:
    for states in keyed:
        await states.make("Hello")
    alice, bob = (request.tenant for request in keyed[0].engine.requests)
    assert "" != alice != bob != ""


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "token_ids": [5]},
        {"prompt": ""},
        {"token_ids": []},
        {"messages": []},
        {"token_ids": [5_000]},
        {"prompt": "a", "metadata": {"k" * 65: ""}},
        {"prompt": "a", "metadata": {"k": "v" * 513}},
        {"prompt": "a", "exact": "maybe"},
        {"prompt": "a", "unknown": 1},
    ],
)
async def test_a_bad_body_is_refused_before_anything_is_computed(states: States, body: dict[str, Any]) -> None:
    await states.refused(400, "POST", "", body)
    assert states.engine.requests == []


async def test_a_missing_parent_or_a_stale_name_is_refused_before_anything_is_computed(states: States) -> None:
    await states.refused(404, "POST", "", {"prompt": "a", "parent": NO_STATE})
    await states.refused(412, "POST", "", {"prompt": "a", "name": "doc"}, headers={"if-match": '"v3"'})
    assert states.engine.requests == []


async def test_a_failed_run_keeps_nothing(states: States) -> None:
    states.engine.failures[0] = (0, Overloaded("busy", retry_after_s=1))
    await states.refused(429, "POST", "", {"prompt": "a"})
    assert (await states.done("GET"))["data"] == []


async def test_a_name_that_moves_meanwhile_is_not_overwritten(states: States) -> None:
    await states.make(name="doc")
    states.engine.hold()
    late = asyncio.create_task(states.ask("POST", "", {"prompt": "late", "name": "doc"}, headers={"if-match": '"v1"'}))
    await asyncio.to_thread(states.engine.wait, lambda: len(states.engine.runs) == 2)
    other = await states.done("POST", "/doc/fork", {"name": "doc"})
    states.engine.release()
    answer = await late
    assert (answer.status_code, answer.headers["x-should-retry"]) == (412, "false")
    assert (await states.done("GET", "/doc"))["id"] == other["id"]


# Idempotency keys ------------------------------------------------------------------------------------------------------------------------


async def test_a_repeated_request_gets_the_same_state(states: States) -> None:
    first = await states.ask("POST", "", {"prompt": "a", "metadata": {"a": "1", "b": "2"}}, headers={"idempotency-key": "k"})
    again = await states.ask("POST", "", {"metadata": {"b": "2", "a": "1"}, "prompt": "a"}, headers={"idempotency-key": "k"})
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["id"] == first.json()["id"]
    assert len(states.engine.requests) == 1
    for body in ({"prompt": "b"}, {"prompt": "a"}):
        error = await states.refused(409, "POST", "", body, headers={"idempotency-key": "k"})
        assert error["code"] == "idempotency_key_reused"
    await states.refused(409, "POST", f"/{first.json()['id']}/fork", {}, headers={"idempotency-key": "k"})
    for bad in ("", "a b", "x" * 256, "\t"):
        await states.refused(400, "POST", "", {"prompt": "a"}, headers={"idempotency-key": bad})


async def test_forks_and_rewinds_are_repeated_without_making_more(states: States) -> None:
    made = await states.make("Hello")
    for path, body in (("fork", {"n": 3}), ("fork", {}), ("rewind", {"to": 6}), ("rewind", {"tokens": 2})):
        headers = {"idempotency-key": f"{path}{body}".replace(" ", "")}
        first = await states.ask("POST", f"/{made['id']}/{path}", body, headers=headers)
        again = await states.ask("POST", f"/{made['id']}/{path}", body, headers=headers)
        assert (first.status_code, again.status_code, again.headers["idempotent-replayed"]) == (200, 200, "true")
        ids = [[each["id"] for each in answer.json().get("data", [answer.json()])] for answer in (first, again)]
        assert ids[0] == ids[1]
    assert len((await states.done("GET"))["data"]) == 7


async def test_a_repeated_fork_says_which_of_its_states_are_gone(states: States) -> None:
    """A client that repeats the request needs the ids of those that it can use."""
    made, headers = await states.make("Hello"), {"idempotency-key": "k"}
    forks = (await states.done("POST", f"/{made['id']}/fork", {"n": 3}, headers=headers))["data"]
    await states.done("DELETE", f"/{forks[1]['id']}")
    again = await states.ask("POST", f"/{made['id']}/fork", {"n": 3}, headers=headers)
    assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
    data = again.json()["data"]
    assert [data[0]["position"], data[2]["position"]] == [6, 6]
    assert data[1] == {"object": "state", "id": forks[1]["id"], "status": "deleted"}
    assert [each["id"] for each in data] == [each["id"] for each in forks]


# Going back ------------------------------------------------------------------------------------------------------------------------------


async def line(states: States) -> list[dict[str, Any]]:
    """States at the positions 6, 9 and 12 of one text."""
    made = [await states.make("Hello")]
    for more in ("abc", "def"):
        made.append(await states.make(more, parent=made[-1]["id"]))
    return made


@pytest.mark.pool
async def test_going_back_to_an_ancestor_shares_its_blob(states: States) -> None:
    made = await line(states)
    computed = len(states.engine.requests)
    for body in ({"to": 9}, {"tokens": 3}, {"to_state": made[1]["id"]}):
        back = await states.done("POST", f"/{made[2]['id']}/rewind", body)
        assert (back["position"], back["parent"], back["origin"]) == (9, made[1]["id"], "rewind")
        assert await states.text(back["id"]) == "<s>Helloabc"
    assert len(states.engine.requests) == computed


@pytest.mark.parametrize(("to", "text", "begin"), [(11, "<s>Helloabcde", 1), (8, "<s>Helloab", 0), (3, "<s>He", None), (1, "<s>", None)])
async def test_going_back_reads_the_tokens_since_the_nearest_ancestor(states: States, to: int, text: str, begin: int | None) -> None:
    made = await line(states)
    back = await states.done("POST", f"/{made[2]['id']}/rewind", {"to": to, "name": "back", "metadata": {"a": "b"}})
    assert (back["position"], back["metadata"]) == (to, {"a": "b"})
    assert back["parent"] == made[2 if begin is None else begin]["id"]
    assert await states.text("back") == text
    fed = states.engine.requests[-1].prompt
    assert len(fed) == to - (0 if begin is None else made[begin]["position"])
    again = await states.done("POST", "/back/rewind", {"to": 1})
    assert await states.text(again["id"]) == "<s>"


async def test_what_was_left_behind_by_going_back_is_no_beginning_of_what_follows(states: States) -> None:
    whole = await states.make("Hello")
    back = await states.done("POST", f"/{whole['id']}/rewind", {"to": 3})
    other = await states.make("xyz", parent=back["id"])
    await states.refused(404, "POST", f"/{other['id']}/rewind", {"to_state": whole["id"]})
    again = await states.done("POST", f"/{other['id']}/rewind", {"to": 6})
    assert await states.text(again["id"]) == "<s>Hexyz"


async def test_going_back_passes_over_ancestors_that_are_gone(states: States) -> None:
    made = await line(states)
    await states.done("DELETE", f"/{made[1]['id']}")
    for body in ({"to": 9}, {"to_state": made[1]["id"]}):
        back = await states.done("POST", f"/{made[2]['id']}/rewind", body)
        assert (back["position"], back["parent"]) == (9, made[0]["id"])
        assert await states.text(back["id"]) == "<s>Helloabc"


async def test_going_where_the_state_has_never_been_is_refused(states: States) -> None:
    made = await line(states)
    other = await states.make("other", name="other")
    for body, advice in (
        ({"to": 13}, "send 1 to 12"),
        ({"tokens": 12}, "can go back 11 at most"),
        ({"tokens": 92_811}, "can go back 11 at most"),
        ({"to": 0}, "greater than or equal to 1"),
        ({}, "send exactly one"),
        ({"to": 9, "tokens": 3}, "send exactly one"),
    ):
        error = await states.refused(400, "POST", f"/{made[2]['id']}/rewind", body)
        assert (advice in error["message"], "-" in error["message"]) == (True, False), error
    missing = [await states.refused(404, "POST", f"/{made[2]['id']}/rewind", {"to_state": to}) for to in (other["id"], "other", NO_STATE)]
    assert missing[0] == missing[1] == missing[2]
    await states.refused(404, "POST", f"/{made[0]['id']}/rewind", {"to_state": made[1]["id"]})


async def test_the_state_of_another_model_is_refused(states: States) -> None:
    made = await states.make()
    states.model.manifest.__dict__.pop("fingerprint", None)
    object.__setattr__(states.model.manifest, "created", "2027-01-02T03:04:05+00:00")  # an exporter has made the model again
    error = await states.refused(400, "POST", "", {"prompt": "a", "parent": made["id"]})
    assert error["param"] == "model"
    assert "only the same model can continue it" in error["message"]
