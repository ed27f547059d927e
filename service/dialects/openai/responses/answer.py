"""A response as JSON, from its fields and what it has said so far."""

from collections.abc import Mapping
from typing import Any

from service.dialects import generation
from service.dialects.openai.responses.said import Said
from service.dialects.openai.responses.schemas import ResponseRequest
from service.dialects.openai.tool_calls import CallBuilder
from service.errors import ServiceError

ENDED = ("completed", "incomplete", "failed", "cancelled")
Json = dict[str, Any]


class Answer:
    """A response. `head`: its fields whatever it says. `call`: None for a text; otherwise the text is a call of the tool `call["name"]`,
    or of the one that it names if that is None."""

    def __init__(self, head: Json, said: Said, call: Mapping[str, str | None] | None) -> None:
        self.head, self.said, self.call = head, said, call
        self.status: str = head["status"]
        self.hex = head["id"].removeprefix("resp_")
        self.item_id = f"{'msg' if call is None else 'fc'}_{self.hex}"  # follows from the response's id: every process gives the same

    def begun(self, status: str) -> Json:
        """Return the response as it was at first."""
        return {**self.head, "status": status}

    def building(self) -> CallBuilder:
        """Return the empty tool call. Only of a response with `call`."""
        assert self.call is not None
        call = CallBuilder(self.call["name"])
        call.id = f"call_{self.hex}"
        return call

    def item(self, status: str) -> Json:
        """Return the output's item."""
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
        """Return the response as it is now."""
        status = self.status
        if not self.said.text and status not in ("completed", "incomplete"):
            return {**self.head, "status": status}
        item = self.item(status if status in ("completed", "in_progress") else "incomplete")
        return {**self.head, "status": status, "output": [item]}


def head_of(body: ResponseRequest, response: str, model: str, *, previous: str | None) -> Json:
    """Return the fields of a new response."""
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
    """Return the `error` of a response that failed."""
    code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt" if error.status < 500 else "server_error"
    return {"code": code, "message": error.message}
