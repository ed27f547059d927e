"""Builds the answers of chat and completions, as a whole or as the chunks of a stream."""

from collections.abc import Iterator, Sequence
from typing import Any

from service.dialects.openai.embeddings import render
from service.dialects.text.answer import sequence_tokens, system_fingerprint, window_warnings
from service.dialects.text.logprobs import token_json
from service.dialects.text.pipeline import AnswerStart
from service.dialects.text.request import kept
from service.dialects.text.schemas import StreamOptions
from service.errors import ServiceError
from service.generation.model import Generator
from service.generation.request import Delta
from service.generation.runs import Runs
from service.http import sse
from service.streams.position import Place, Sent
from service.streams.source import Received


class Chunks(sse.Script[tuple[int, Delta]]):
    """Builds one answer, as a whole or as chunks. A whole answer contains the token counts (`usage`), a stream only on request."""

    def __init__(self, model: Generator, runs: Runs, options: StreamOptions | None, start: AnswerStart, *, object_: str) -> None:
        self.model, self.runs = model, runs
        self.sent: Sent | None = None  # the position up to which chunks were sent; None if the stream cannot be continued
        self.places = start.places or (Place(),) * len(runs.runs)  # the client's position in each choice
        self.head = {
            "id": start.id,
            "object": object_,
            "created": start.created,
            "model": model.name,
            "system_fingerprint": system_fingerprint(model),
        }
        self._with_usage = bool(options and options.include_usage)
        self._padded = bool(options and options.include_obfuscation)
        self._continuous = bool(options and options.continuous_usage_stats)
        self.tokens = token_json(model.vocabulary)

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the JSON of choice `index` in a chunk. It contains only what `delta` adds to the choice."""
        raise NotImplementedError

    def answer(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        prompt, completion = self.runs.prompt_tokens, self.runs.completion_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.runs.cached_tokens},
        }
        return {**self.head, "choices": choices, "usage": usage, **self._only_state(choices), **self._warnings()}

    def pieces(self, pieces: Sequence[tuple[int, Delta]]) -> sse.Written:
        return b"".join([self.piece(index, delta) for index, delta in pieces])

    def piece(self, index: int, delta: Delta) -> bytes:
        """Return the chunk of a delta, or b"" if the delta has nothing to send. Its tokens then count in the next chunk's event id."""
        if self.sent is not None:
            self.sent.add(index, delta.token_ids, ended=delta.finish_reason is not None)
        return self.chunk([self.choice(index, delta)]) if worth_sending(delta) else b""

    def begin(self, index: int) -> None:
        """Record that the next chunk begins the choice `index`, and contains none of the choice's tokens."""
        if self.sent is not None:
            self.sent.begin(index)

    async def restore(self, received: Sequence[Received]) -> None:
        """Set this object's state as if it had sent `received` itself: for each choice, the part that the client already has."""
        for index, part in enumerate(received):
            if self.sent is not None:
                self.sent.restore(index, part.token_ids, part.place)
            await self.skip(index, part)

    async def skip(self, index: int, part: Received) -> None:
        """Set the state of a choice as if `part` had been sent. Does nothing here: classes with such a state override it."""

    def chunk(self, choices: Sequence[dict[str, Any]]) -> bytes:
        content = self._content(choices)
        return self._id + sse.event(sse.padded(content) if self._padded else content)

    def chunk_pieces(self, choices: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        yield self._id
        yield from sse.event_pieces(self._content(choices))

    @property
    def _id(self) -> bytes:
        return b"" if self.sent is None else self.sent.line

    def _content(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self._with_usage and self._continuous:
            return self.answer(choices)
        ended = any(choice.get("finish_reason") for choice in choices)
        usage = {"usage": None} if self._with_usage else {}
        return {**self.head, "choices": choices, **usage, **self._only_state(choices), **(self._warnings() if ended else {})}

    def _warnings(self) -> dict[str, Any]:
        lengths = (sequence_tokens(run.request, run.usage.completion_tokens) for run in self.runs.runs)
        return window_warnings(self.model, max(lengths, default=0))

    def state(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the field `state` of a choice if this is its last delta and its state was stored, else no field."""
        state = None if delta.finish_reason is None else kept(self.runs.runs[index].request)
        return {} if state is None else {"state": state}

    def _only_state(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the field `state` for the top level of the answer: a copy of the choice's field, if the answer has only one choice."""
        return {"state": choices[0]["state"]} if len(self.runs.runs) == 1 and choices and "state" in choices[0] else {}

    def closing(self) -> bytes:
        usage = self._id + sse.event(self.answer([])) if self._with_usage else b""
        return usage + self._id + sse.DONE

    def failure(self, error: ServiceError) -> bytes:
        return sse.event(render(error)[1])


def worth_sending(delta: Delta) -> bool:
    """Return whether a delta contains text, log-probabilities or a finish reason. A token that ends inside a character may have none."""
    return bool(delta.text or delta.logprobs or delta.finish_reason)
