"""`/v1/conversations`: by hand, and by OpenAI's own client."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from service.errors import RuntimeFailed
from tests.service.dialects.responses.conftest import Responses, service
from tests.service.fakes import PATIENCE_S
from tests.service.generation_fakes import SAID, FakeGenerator

RULE = {"role": "system", "content": "Be brief."}
CONVERSATIONS = "/v1/conversations"


async def begin(responses: Responses, **body: Any) -> str:
    answer = await responses.http.post(CONVERSATIONS, json=body)
    assert answer.status_code == 200, answer.text
    id_: str = answer.json()["id"]
    return id_


async def texts(responses: Responses, conversation: str) -> list[tuple[str, str]]:
    """Role and text of each item."""
    page = (await responses.http.get(f"{CONVERSATIONS}/{conversation}/items", params={"order": "asc"})).json()
    return [(item["role"], item["content"][0]["text"]) for item in page["data"]]


def read_by(responses: Responses) -> str:
    """What the last request has fed."""
    return responses.model.decode(responses.engine.requests[-1].prompt)


def test_a_conversation_with_the_official_client(official: openai.OpenAI, served: tuple[str, FakeGenerator]) -> None:
    client = official.conversations
    made = client.create(metadata={"topic": "sums"}, items=[{"type": "message", "role": "system", "content": "Be brief."}])
    assert (made.object, made.metadata) == ("conversation", {"topic": "sums"})
    assert client.retrieve(made.id) == made
    assert client.update(made.id, metadata={"topic": "means"}).metadata == {"topic": "means"}
    first = official.responses.create(model="wordy", input="Hi", conversation=made.id)
    assert (first.output_text, first.conversation.id if first.conversation else None) == (SAID, made.id)
    assert served[1].decode(served[1].engine.requests[-1].prompt) == "<s><system>Be brief.\n<user>Hi\n<assistant>"
    second = official.responses.create(model="wordy", input="More", conversation={"id": made.id})
    assert served[1].decode(served[1].engine.requests[-1].prompt) == "\n<user>More\n<assistant>", "what it has seen is not read again"
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
    items = list(client.items.list(made.id, limit=2, order="asc"))
    assert [item.role for item in items if item.type == "message"] == ["system", "user", "assistant", "user", "assistant"]
    assert [item.id for item in client.items.list(made.id)] == [item.id for item in items][::-1]
    added = client.items.create(made.id, items=[{"type": "message", "role": "user", "content": "Note this."}])
    assert client.items.retrieve(added.data[0].id, conversation_id=made.id) == added.data[0]
    assert client.items.delete(added.data[0].id, conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        client.items.retrieve(added.data[0].id, conversation_id=made.id)
    assert client.delete(made.id).deleted
    for gone in (lambda: client.retrieve(made.id), lambda: official.responses.create(model="wordy", input="More", conversation=made.id)):
        with pytest.raises(openai.NotFoundError, match="Conversation with id"):
            gone()


# What a response reads -------------------------------------------------------------------------------------------------------------------


async def test_items_that_no_response_has_seen_are_read_before_its_input(responses: Responses) -> None:
    id_ = await begin(responses)
    await responses.make(conversation=id_)
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "3"}
    answer = await responses.http.post(f"{CONVERSATIONS}/{id_}/items", json={"items": [{"role": "user", "content": "Note"}, call, output]})
    assert [item["type"] for item in answer.json()["data"]] == ["message", "function_call", "function_call_output"]
    made = await responses.make(input="More", conversation=id_)
    assert read_by(responses) == "\n<user>Note\n<assistant>\n<tool>3\n<user>More\n<assistant>"
    (item,) = (await responses.ask("GET", f"/{made['id']}/input_items")).json()["data"]
    assert item["content"][0]["text"] == "More", "a response lists its own input"


async def test_all_is_read_again_without_an_item_that_was_deleted(responses: Responses) -> None:
    id_ = await begin(responses, items=[RULE])
    await responses.make(conversation=id_)
    (first,) = (await responses.http.get(f"{CONVERSATIONS}/{id_}/items", params={"order": "asc", "limit": 1})).json()["data"]
    assert (await responses.http.delete(f"{CONVERSATIONS}/{id_}/items/{first['id']}")).json()["object"] == "conversation"
    await responses.make(input="More", conversation=id_)
    assert read_by(responses) == f"<s><user>Hi\n<assistant>{SAID}\n<user>More\n<assistant>"
    await responses.make(input="And", conversation=id_)
    assert read_by(responses) == "\n<user>And\n<assistant>"


async def test_all_is_read_again_when_its_state_is_gone(responses: Responses) -> None:
    id_ = await begin(responses)
    made = await responses.make(conversation=id_)
    await responses.ask("DELETE", f"/{made['id']}")
    again = await responses.make(input="More", conversation=id_)
    assert read_by(responses) == f"<s><user>Hi\n<assistant>{SAID}\n<user>More\n<assistant>"
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == 0


async def test_of_responses_at_the_same_time_none_is_lost(responses: Responses) -> None:
    """No state has seen both, so the next response reads all items."""
    id_ = await begin(responses)
    responses.engine.hold()
    asked = [asyncio.create_task(responses.make(input=text, conversation=id_)) for text in ("a", "b")]
    await asyncio.to_thread(responses.engine.wait, lambda: len(responses.engine.runs) == 2)
    responses.engine.release()
    await asyncio.gather(*asked)
    told = await texts(responses, id_)
    assert sorted(told) == sorted([("user", "a"), ("user", "b"), ("assistant", SAID), ("assistant", SAID)])
    await responses.make(input="More", conversation=id_)
    assert read_by(responses).count("<user>") == 3


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
async def test_a_response_that_has_no_whole_output_is_no_part_of_it(responses: Responses, ends: str) -> None:
    id_ = await begin(responses)
    if ends == "failed":
        responses.engine.failures[0] = (2, RuntimeFailed("broken"))
    else:
        responses.engine.hold(2)
    made = await responses.make(conversation=id_, background=True)
    if ends == "cancelled":
        await responses.ask("POST", f"/{made['id']}/cancel")
    assert (await responses.ended(made["id"]))["status"] == ends
    assert await texts(responses, id_) == []


async def test_a_state_is_that_of_the_conversation_only_if_nothing_was_changed_meanwhile(responses: Responses) -> None:
    """Also if there are as many items as before."""
    id_ = await begin(responses, items=[RULE])
    responses.engine.hold(2)
    made = await responses.make(conversation=id_, background=True)
    await asyncio.to_thread(responses.engine.wait, lambda: responses.engine.runs)
    (rule,) = (await responses.http.get(f"{CONVERSATIONS}/{id_}/items")).json()["data"]
    await responses.http.delete(f"{CONVERSATIONS}/{id_}/items/{rule['id']}")
    await responses.http.post(f"{CONVERSATIONS}/{id_}/items", json={"items": [{"role": "user", "content": "Note"}]})
    responses.engine.release()
    await responses.ended(made["id"])
    await responses.make(input="More", conversation=id_)
    assert read_by(responses) == f"<s><user>Note\n<user>Hi\n<assistant>{SAID}\n<user>More\n<assistant>"


async def test_an_incomplete_response_is_part_of_it(responses: Responses) -> None:
    id_ = await begin(responses)
    await responses.make(conversation=id_, max_output_tokens=4)
    assert await texts(responses, id_) == [("user", "Hi"), ("assistant", "Once")]
    await responses.make(input="More", conversation=id_)
    assert read_by(responses) == "\n<user>More\n<assistant>"


async def test_a_response_that_another_process_finishes_is_part_of_it_once(tmp_path: Path) -> None:
    async with service(states=str(tmp_path)) as responses:
        id_ = await begin(responses, items=[RULE])
        responses.engine.hold(4)
        made = await responses.make(conversation=id_, background=True)
        await responses.until(lambda found: found["output"], made["id"])
    async with service(states=str(tmp_path)) as responses:
        await responses.running.sweep()
        whole = await responses.ended(made["id"])
        assert read_by(responses) == "<s><system>Be brief.\n<user>Hi\n<assistant>"
        assert (whole["status"], whole["conversation"]) == ("completed", {"id": id_})
        assert await texts(responses, id_) == [("system", "Be brief."), ("user", "Hi"), ("assistant", SAID)]
        await responses.make(input="More", conversation=id_)
        assert read_by(responses) == "\n<user>More\n<assistant>"


# Refusals --------------------------------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_combined_is_refused(responses: Responses) -> None:
    id_ = await begin(responses)
    made = await responses.make(store_state={"name": "doc"})
    for fields, param in (({"previous_response_id": made["id"]},) * 2, ({"state": "doc"},) * 2, ({"store": False},) * 2):
        error = await responses.refused(400, "POST", json={"input": "Hi", "conversation": id_, **fields})
        assert error["param"] == next(iter(param))
    for bad in ("", {}, {"id": None}, 3, [], {"id": id_, "more": 1}):
        await responses.refused(400, "POST", json={"input": "Hi", "conversation": bad})
    assert len(responses.engine.requests) == 1


async def test_bodies_are_checked(responses: Responses) -> None:
    id_ = await begin(responses)
    message = {"role": "user", "content": "Hi"}
    for path, body in (
        ("", {"items": [message] * 21}),
        ("", {"items": [{"type": "reasoning"}]}),
        ("", {"metadata": {"a": 1}}),
        ("", {"unknown": 1}),
        (f"/{id_}", {}),
        (f"/{id_}", {"metadata": {str(at): "" for at in range(17)}}),
        (f"/{id_}/items", {}),
        (f"/{id_}/items", {"items": []}),
        (f"/{id_}/items", {"items": None}),
    ):
        answer = await responses.http.post(f"{CONVERSATIONS}{path}", json=body)
        assert (answer.status_code, bool(answer.json()["error"]["param"])) == (400, True), answer.text
    assert (await responses.http.post(CONVERSATIONS, content=b"")).status_code == 200, "an empty body begins an empty conversation"
    error = (await responses.http.get(f"{CONVERSATIONS}/{id_}/items", params={"after": "none"})).json()["error"]
    assert "begin with the first page" in error["message"]


async def test_a_conversation_has_a_bounded_number_of_items(responses: Responses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.dialects.openai.responses.conversations.MOST_ITEMS", 3)
    id_ = await begin(responses, items=[RULE])
    await responses.make(conversation=id_)
    answer = await responses.http.post(f"{CONVERSATIONS}/{id_}/items", json={"items": [RULE]})
    assert (answer.status_code, "the most is 3" in answer.text) == (400, True)
    error = await responses.refused(400, "POST", json={"input": "Hi", "conversation": id_})
    assert "the most is 3" in error["message"]
    assert len(responses.engine.requests) == 1, "it is refused before anything is generated"


async def test_a_conversation_has_a_bounded_number_of_bytes(responses: Responses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.dialects.openai.responses.conversations.MOST_BYTES", 1000)
    id_ = await begin(responses, items=[RULE])
    answer = await responses.http.post(f"{CONVERSATIONS}/{id_}/items", json={"items": [{**RULE, "content": "x" * 700}]})
    assert (answer.status_code, "the most is 1000" in answer.text) == (400, True)
    error = await responses.refused(400, "POST", json={"input": "x" * 700, "conversation": id_})
    assert (error["param"], "the most is 1000" in error["message"]) == ("items", True)
    assert not responses.engine.requests, "it is refused before anything is generated"
    assert len((await responses.http.get(f"{CONVERSATIONS}/{id_}/items")).json()["data"]) == 1
    await responses.make(conversation=id_)


async def test_a_foreign_conversation_is_a_missing_one(keyed: tuple[Responses, Responses]) -> None:
    mine, other = keyed
    id_ = await begin(mine, items=[RULE])
    item = (await mine.http.get(f"{CONVERSATIONS}/{id_}/items")).json()["data"][0]["id"]
    for method, path, body in (
        ("GET", "", None),
        ("POST", "", {"metadata": {}}),
        ("DELETE", "", None),
        ("GET", "/items", None),
        ("POST", "/items", {"items": [RULE]}),
        ("GET", f"/items/{item}", None),
        ("DELETE", f"/items/{item}", None),
    ):
        foreign = await other.http.request(method, f"{CONVERSATIONS}/{id_}{path}", json=body)
        missing = await other.http.request(method, f"{CONVERSATIONS}/conv_none{path}", json=body)
        assert (foreign.status_code, foreign.text) == (404, missing.text.replace("conv_none", id_))
    await other.refused(404, "POST", json={"input": "Hi", "conversation": id_})
    assert len(await texts(mine, id_)) == 1
    async with asyncio.timeout(PATIENCE_S):
        await mine.make(conversation=id_)
