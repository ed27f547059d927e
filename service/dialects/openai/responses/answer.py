"""Builds the JSON of a response from its fields and the text that was generated so far."""

from collections.abc import Mapping
from typing import Any, cast

from service.dialects.openai.responses.generated_text import Said
from service.dialects.openai.responses.schemas import ResponseRequest
from service.dialects.openai.tool_calls import CallBuilder
from service.dialects.openai.written_calls import WrittenCalls, WrittenForm, content_of
from service.dialects.text.answer import unix_time
from service.errors import ServiceError

ENDED = ("completed", "incomplete", "failed", "cancelled")
Json = dict[str, Any]


class Answer:
    """A response. `head` has the fields that do not depend on the generated text `said`.

    If `call` is None, the output is a message with this text. If `call` has the key `name`, the text is a required call: of this tool,
    or if the name is None, of the tool that the text names. Otherwise `call` is the form (`WrittenForm`) in which the text may have
    calls. The output is then a message, which may be empty, and the calls.
    """

    def __init__(self, head: Json, said: Said, call: Mapping[str, Any] | None) -> None:
        self.head, self.said, self.call = head, said, call
        self.required = call is not None and "name" in call
        self.status: str = head["status"]
        self.hex = head["id"].removeprefix("resp_")
        self.item_id = f"{'fc' if self.required else 'msg'}_{self.hex}"  # depends only on the response's id: the same in every process

    def begun(self, status: str) -> Json:
        """Return the response with this status and without output, for the first events of a stream."""
        return {**self.head, "status": status}

    def building(self) -> CallBuilder:
        """Return an empty builder for the required tool call."""
        assert self.call is not None
        return CallBuilder(self.call["name"], f"call_{self.hex}")

    def reader(self) -> WrittenCalls | None:
        """Return a reader of the calls that the model writes by itself, or None if the text has no such calls."""
        if self.call is None or self.required:
            return None
        return WrittenCalls(cast(WrittenForm, self.call), lambda at: f"call_{self.hex}_{at}")

    def items(self, status: str) -> list[Json]:
        """Return the output: a message, a required call, or a message and the calls that the model has written."""
        if self.required:
            call = self.building()
            call.push(self.said.text)
            return [self.call_item(call, status)]
        if (reader := self.reader()) is None:
            return [self._message(status)]
        parts = [*reader.push(self.said.text), *([] if status == "in_progress" else reader.end())]
        calls = (self.call_item(call, status, self.written_id(at)) for at, call in enumerate(reader.calls))
        return [self._message(status, content_of(parts)), *calls]

    def written_id(self, at: int) -> str:
        """Return the id of the item of a call that the model writes by itself; `at` counts these calls from 0."""
        return f"fc_{self.hex}_{at}"

    def call_item(self, call: CallBuilder, status: str, id: str | None = None) -> Json:
        called = {"call_id": call.id, "name": call.name or "", "arguments": call.arguments}
        return {"id": id or self.item_id, "type": "function_call", "status": status, **called}

    def _message(self, status: str, text: str | None = None) -> Json:
        """`text` None: all."""
        written = self.said.written(text)
        part = {"type": "output_text", "text": written["text"], "annotations": [], "logprobs": written["logprobs"]}
        content = [] if status == "in_progress" and not written["text"] else [part]
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def response(self) -> Json:
        """Return the JSON of the response, with the text that was generated so far."""
        status = self.status
        if not self.said.text and status not in ("completed", "incomplete"):
            return {**self.head, "status": status}
        return {**self.head, "status": status, "output": self.items(status if status in ("completed", "in_progress") else "incomplete")}


def head_of(body: ResponseRequest, response: str, model: str, *, previous: str | None) -> Json:
    """Return the fields of a new response, before any text is generated."""
    return {
        "id": response,
        "object": "response",
        "created_at": unix_time(),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
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
