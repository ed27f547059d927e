"""OpenAI's own client, unmodified: chains, background responses, and streams that break."""

from typing import Any

import openai
import pytest

from tests.service.generation_fakes import SAID, FakeGenerator


def test_input_tokens_are_counted_before_a_response_is_made(official: openai.OpenAI, served: tuple[str, FakeGenerator]) -> None:
    """The number is that of the response's usage, and nothing is generated for it."""
    first = official.responses.create(model="wordy", input="Hi")
    conversation = official.conversations.create(items=[{"type": "message", "role": "user", "content": "Before"}])
    asked: list[dict[str, Any]] = [
        {"input": "Hi"},
        {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief."},
        {"input": "More", "previous_response_id": first.id},
        {"input": "More", "conversation": conversation.id},
    ]
    for body in asked:
        served[1].engine.forget()
        counted = official.responses.input_tokens.count(model="wordy", **body)
        assert not served[1].engine.requests
        made = official.responses.create(model="wordy", **body)
        assert made.usage is not None
        assert counted.input_tokens == made.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="Previous response"):
        official.responses.input_tokens.count(model="wordy", input="Hi", previous_response_id="resp_" + "0" * 32)


def test_a_broken_stream_goes_on_after_its_last_event(official: openai.OpenAI, served: tuple[str, FakeGenerator]) -> None:
    served[1].engine.hold(6)
    text, last, id_ = "", -1, ""
    with official.responses.create(model="wordy", input="Hi", background=True, stream=True) as stream:
        for event in stream:
            last = event.sequence_number
            if event.type == "response.created":
                id_ = event.response.id
            if event.type == "response.output_text.delta":
                text += event.delta
                if len(text) >= 3:
                    break
    served[1].engine.release()
    for event in official.responses.retrieve(id_, stream=True, starting_after=last):
        assert event.sequence_number > last
        if event.type == "response.output_text.delta":
            text += event.delta
    assert event.type == "response.completed"
    assert text == SAID == event.response.output_text


def test_the_same_key_makes_one_response(official: openai.OpenAI, served: tuple[str, FakeGenerator]) -> None:
    made = [official.responses.create(model="wordy", input="Hi", extra_headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert made[0] == made[1]
    assert len(served[1].engine.requests) == 1
