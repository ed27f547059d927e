"""A response: its text, decoded token by token, and its JSON.

A client that lost its stream names the last event that it received, and the number of an event is derived from a number of tokens. So this
module must know how many characters of the text each token completes. It decodes the tokens one at a time, so that these numbers depend
only on the tokens, and not on which tokens arrive together in a delta.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from service.dialects.openai.responses.schemas import ResponseRequest
from service.dialects.openai.tool_calls import CallBuilder
from service.dialects.openai.written_calls import CallReader, RequiredCall, WrittenCalls, WrittenForm, content_of
from service.dialects.text.answer import unix_time
from service.dialects.text.logprobs import TokenJson, token_json
from service.errors import ServiceError
from service.generation.model import DecoderModel
from service.generation.request import Delta, FinishReason, GenerationRequest
from service.generation.text import TextStream
from service.http.answers import Elements, Text

_CHUNK = 16_384  # number of characters that are serialised in one call
ENDED = ("completed", "incomplete", "failed", "cancelled")
Json = dict[str, Any]


@dataclass
class Said:
    """A generated text with its tokens and their log-probabilities."""

    ids: list[int] = field(default_factory=list)  # empty if the response has ended and is read from the store
    ends: list[int] = field(default_factory=list)  # for each token, the length of the text that is complete after it, in characters
    text: str = ""  # at the end, includes text that was held back, such as a possible beginning of a stop string
    logprobs: list[bytes] = field(default_factory=list)  # JSON for each token; empty if no log-probabilities were requested

    @property
    def count(self) -> int:
        """Return the number of generated tokens."""
        return len(self.ends)

    def end(self, count: int) -> int:
        """Return the length, in characters, of the text that the first `count` tokens have completed."""
        return self.ends[count - 1] if count else 0


class Saying(Said):
    """A generated text that grows while tokens arrive."""

    def __init__(self, model: DecoderModel, request: GenerationRequest) -> None:
        super().__init__()
        self.finish_reason: FinishReason | None = None
        self._tokens: TokenJson = token_json(model.vocabulary)
        self._min_tokens = request.min_tokens
        self._ending = frozenset((*(() if request.ignore_eos else model.eos_token_ids), *request.stop_token_ids))
        self._stream = TextStream(
            model.vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
        )

    def add(self, delta: Delta) -> None:
        """Append the tokens of `delta`. Their text is decoded here. The delta's own text is not used: it may not end with a token."""
        self._push(delta.token_ids)
        self.logprobs += [self._tokens.chat((each,)) for each in delta.logprobs]
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.text += self._stream.finish()

    def resume(self, said: Said) -> None:
        """Append the tokens that another process has generated, except the last. This process samples the last token again, so that it also
        learns the finish reason if the text ends there."""
        kept = max(0, said.count - 1)
        self._push(said.ids[:kept])
        self.logprobs += said.logprobs[:kept]

    def _push(self, ids: Iterable[int]) -> None:
        for token_id in ids:
            self.ids.append(token_id)
            if token_id not in self._ending:  # a token that ends the generation has no text
                self.text += self._stream.push(token_id, may_stop=len(self.ids) > self._min_tokens)
            self.ends.append(len(self.text))


def joined(elements: Sequence[bytes]) -> orjson.Fragment:
    """Return the serialised elements as one JSON list."""
    return orjson.Fragment(b"[%b]" % b",".join(elements))


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
        """Return the response as it was before its first token, with this status, for the first events of a stream."""
        unknown = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        head = {name: value for name, value in self.head.items() if name not in ("state", "warnings")}
        return {**head, **unknown, "status": status}

    def reader(self) -> CallReader | None:
        """Return a reader of the text's calls, or None if the text has none."""
        if self.call is None:
            return None
        if self.required:
            return RequiredCall(self.call["name"], f"call_{self.hex}")
        return WrittenCalls(cast(WrittenForm, self.call), lambda at: f"call_{self.hex}_{at}")

    def items(self, status: str) -> list[Json]:
        """Return the output: a message, a required call, or a message and the calls that the model has written."""
        if (reader := self.reader()) is None:
            return [self._message(status, self.said.text)]
        parts = [*reader.push(self.said.text), *([] if status == "in_progress" else reader.end())]
        calls = [self.call_item(call, status, at) for at, call in enumerate(reader.calls)]
        return calls if self.required else [self._message(status, content_of(parts)), *calls]

    def call_id(self, at: int) -> str:
        """Return the id of the item of a call; `at` counts the calls from 0."""
        return self.item_id if self.required else f"fc_{self.hex}_{at}"

    def call_item(self, call: CallBuilder, status: str, at: int) -> Json:
        called = {"call_id": call.id, "name": call.name or "", "arguments": call.arguments}
        return {"id": self.call_id(at), "type": "function_call", "status": status, **called}

    def _message(self, status: str, text: str) -> Json:
        """Return a message with this text, the part that is not in tool calls, as JSON that `http/answers.py` can write in pieces."""
        written, logprobs = Text(), Elements()
        for at in range(0, len(text), _CHUNK):
            written.add(text[at : at + _CHUNK])
        for element in self.said.logprobs:
            logprobs.add(element)
        part = {"type": "output_text", "text": written, "annotations": [], "logprobs": logprobs}
        content = [] if status == "in_progress" and not text else [part]
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
