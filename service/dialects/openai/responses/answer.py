"""Builds the JSON of a response from its fields and the text that was generated so far."""

from collections.abc import Mapping
from typing import Any

from service.dialects import generation
from service.dialects.openai.responses.generated_text import Said
from service.dialects.openai.responses.schemas import ResponseRequest
from service.dialects.openai.tool_calls import CallBuilder
from service.errors import ServiceError

ENDED = ("completed", "incomplete", "failed", "cancelled")
Json = dict[str, Any]


class Answer:
    """A response. `head` has the fields that do not depend on the generated text `said`. If `call` is None, the output is a message with
    this text. Otherwise the text is a tool call: of the tool `call["name"]`, or if that is None, of the tool that the text names."""

    def __init__(self, head: Json, said: Said, call: Mapping[str, str | None] | None) -> None:
        self.head, self.said, self.call = head, said, call
        self.status: str = head["status"]
        self.hex = head["id"].removeprefix("resp_")
        self.item_id = f"{'msg' if call is None else 'fc'}_{self.hex}"  # depends only on the response's id: the same in every process

    def begun(self, status: str) -> Json:
        """Return the response with this status and without output, for the first events of a stream."""
        return {**self.head, "status": status}

    def building(self) -> CallBuilder:
        """Return an empty builder for the response's tool call. Requires that `call` is not None."""
        assert self.call is not None
        call = CallBuilder(self.call["name"])
        call.id = f"call_{self.hex}"
        return call

    def item(self, status: str) -> Json:
        """Return the only item of the output: a message or a tool call."""
        if self.call is None:
            content = [] if status == "in_progress" and not self.said.text else [self.part()]
            return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}
        call = self.building()
        call.push(self.said.text)
        return self.call_item(call, status)

    def call_item(self, call: CallBuilder, status: str) -> Json:
        called = {"call_id": call.id, "name": call.name or "", "arguments": call.arguments}
        return {"id": self.item_id, "type": "function_call", "status": status, **called}

    def part(self) -> Json:
        written = self.said.written()
        return {"type": "output_text", "text": written["text"], "annotations": [], "logprobs": written["logprobs"]}

    def response(self) -> Json:
        """Return the JSON of the response, with the text that was generated so far."""
        status = self.status
        if not self.said.text and status not in ("completed", "incomplete"):
            return {**self.head, "status": status}
        item = self.item(status if status in ("completed", "in_progress") else "incomplete")
        return {**self.head, "status": status, "output": [item]}


def head_of(body: ResponseRequest, response: str, model: str, *, previous: str | None) -> Json:
    """Return the fields of a new response, before any text is generated."""
    return {
        "id": response,
        "object": "response",
        "created_at": generation.now(),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": False,
        "previous_response_id": previous,
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
        "store": body.store,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {"format": {"type": "text"}},
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
        "tools": [{"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)} for tool in body.tools],
        "truncation": "disabled",
        "background": body.background,
        "usage": None,
    }


def usage_of(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Json:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_of(error: ServiceError) -> Json:
    """Return the field `error` of a response that failed with this error."""
    code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt" if error.status < 500 else "server_error"
    return {"code": code, "message": error.message}
