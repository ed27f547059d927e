"""OpenAI's own client, unmodified, with states."""

import openai
import pytest

from tests.service.generation_fakes import SAID, FakeGenerator


def test_a_conversation_is_continued_from_its_state(official: openai.OpenAI, served: tuple[str, FakeGenerator]) -> None:
    first = official.chat.completions.create(
        model="wordy", messages=[{"role": "user", "content": "Hi"}], extra_body={"store_state": {"name": "chat", "metadata": {"a": "b"}}}
    )
    assert first.model_extra is not None
    second = official.responses.create(
        model="wordy", input="And?", extra_body={"state": first.model_extra["state"]["id"], "store_state": {"name": "chat"}}
    )
    assert second.output_text == SAID
    assert served[1].decode(served[1].engine.requests[-1].prompt) == "\n<user>And?\n<assistant>"
    stream = official.completions.create(
        model="wordy", prompt="", max_tokens=4, stream=True, extra_body={"state": "chat", "store_state": True}
    )
    *_, last = stream
    assert last.model_extra is not None
    assert last.model_extra["state"]["parent"] == second.model_extra["state"]["id"]  # type: ignore[index]


@pytest.mark.parametrize("status", [409, 412])
def test_a_lost_race_is_not_repeated_by_the_client(official: openai.OpenAI, served: tuple[str, FakeGenerator], status: int) -> None:
    """The client repeats a 409 by itself unless it is told not to."""
    eager = official.with_options(max_retries=5)
    body: dict[str, object] = {"prompt": "a", "metadata": {"status": str(status)}}
    headers = {"idempotency-key": f"k{status}"} if status == 409 else {"if-match": '"v9"'}
    if status == 409:
        eager.post("/states", body=body, options={"headers": headers}, cast_to=object)
    before = len(served[1].engine.requests)
    asked = 0

    def count(_: object) -> None:
        nonlocal asked
        asked += 1

    eager._client.event_hooks["request"].append(count)
    try:
        with pytest.raises(openai.APIStatusError) as refused:
            eager.post("/states", body={**body, "prompt": "b", "name": "doc"}, options={"headers": headers}, cast_to=object)
    finally:
        eager._client.event_hooks["request"].remove(count)
    assert (refused.value.status_code, asked) == (status, 1)
    assert len(served[1].engine.requests) == before
