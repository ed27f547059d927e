"""OpenAI's own client, unmodified: chains, background responses, and streams that break."""

from typing import Any

import openai
import pytest

from tests.service.generation_fakes import FakeGenerator


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
