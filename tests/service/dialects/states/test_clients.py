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


def test_a_lost_race_is_not_repeated_by_the_client(official: openai.OpenAI, served: tuple[str, FakeGenerator]) -> None:
    """The client repeats a 409 by itself unless it is told not to."""
    headers = {"idempotency-key": "k"}
    official.post("/states", body={"prompt": "a"}, options={"headers": headers}, cast_to=object)
    before = len(served[1].engine.requests)
    with pytest.raises(openai.APIStatusError) as refused:
        official.with_options(max_retries=5).post("/states", body={"prompt": "b"}, options={"headers": headers}, cast_to=object)
    assert refused.value.status_code == 409
    assert refused.value.request.headers["x-stainless-retry-count"] == "0"
    assert len(served[1].engine.requests) == before
