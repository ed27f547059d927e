"""Builds the answers of chat and completions, as a whole or as the chunks of a stream."""

from collections.abc import Iterator, Sequence
from typing import Any

from service.dialects import generation
from service.dialects.generation_schemas import StreamOptions
from service.dialects.openai.embeddings import render
from service.dialects.openai.token_json import token_json
from service.dialects.states.turns import kept
from service.errors import ServiceError
from service.generation.model import Generator
from service.generation.request import Delta
from service.generation.runs import Runs
from service.http import sse


class Chunks(sse.Script[tuple[int, Delta]]):
    """Builds one answer or its chunks. A whole answer contains the usage, a stream only if the request asks for it."""

    def __init__(self, model: Generator, runs: Runs, options: StreamOptions | None, *, id_prefix: str, object_: str) -> None:
        self.model, self.runs = model, runs
        self.head = {
            "id": generation.new_id(id_prefix),
            "object": object_,
            "created": generation.now(),
            "model": model.name,
            "system_fingerprint": generation.system_fingerprint(model),
        }
        self._with_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self.tokens = token_json(model.vocabulary)

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the part of a choice that a delta adds."""
        raise NotImplementedError

    def answer(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        prompt, completion = self.runs.prompt_tokens, self.runs.completion_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.runs.cached_tokens},
        }
        return {**self.head, "choices": choices, "usage": usage, **self._only_state(choices)}

    def pieces(self, pieces: Sequence[tuple[int, Delta]]) -> sse.Written:
        return b"".join([self.chunk([self.choice(index, delta)]) for index, delta in pieces if worth_sending(delta)])

    def chunk(self, choices: Sequence[dict[str, Any]]) -> bytes:
        return sse.event(self._content(choices))

    def chunk_pieces(self, choices: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        return sse.event_pieces(self._content(choices))

    def _content(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self._with_usage and self._continuous:
            return self.answer(choices)
        return {**self.head, "choices": choices, **({"usage": None} if self._with_usage else {}), **self._only_state(choices)}

    def state(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the field `state` of a choice if this is its last delta and its state was kept."""
        state = None if delta.finish_reason is None else kept(self.runs.runs[index].request)
        return {} if state is None else {"state": state}

    def _only_state(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the only choice for the top level."""
        return {"state": choices[0]["state"]} if len(self.runs.runs) == 1 and choices and "state" in choices[0] else {}

    def closing(self) -> bytes:
        return (sse.event(self.answer([])) if self._with_usage else b"") + sse.DONE

    def failure(self, error: ServiceError) -> bytes:
        return sse.event(render(error)[1])


def worth_sending(delta: Delta) -> bool:
    """Return whether a delta contains text, log-probabilities or a finish reason. A token's text may come with the next token."""
    return bool(delta.text or delta.logprobs or delta.finish_reason)
