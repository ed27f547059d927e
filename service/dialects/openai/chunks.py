"""Streamed chunks of OpenAI, the same for completions and chat."""

from collections.abc import Iterator, Sequence
from typing import Any

from service.dialects import generation
from service.dialects.generation_schemas import StreamOptions
from service.dialects.openai.embeddings import render
from service.dialects.openai.token_json import token_json
from service.errors import ServiceError
from service.generation.runs import Generator, Runs
from service.http import sse


class Chunks:
    """The chunks of a script of `service/http/sse.py`, and its end. Each chunk has the head, choices, and the usage if it is requested."""

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

    def chunk(self, choices: Sequence[dict[str, Any]]) -> bytes:
        return sse.event(self._content(choices))

    def chunk_pieces(self, choices: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        return sse.event_pieces(self._content(choices))

    def _content(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": generation.usage_of(self.runs) if self._continuous else None} if self._with_usage else {}
        return {**self.head, "choices": choices, **usage}

    def closing(self) -> bytes:
        usage = sse.event({**self.head, "choices": [], "usage": generation.usage_of(self.runs)}) if self._with_usage else b""
        return usage + sse.DONE

    def failure(self, error: ServiceError) -> bytes:
        return sse.event(render(error)[1])
