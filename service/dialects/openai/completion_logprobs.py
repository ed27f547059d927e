"""Builds the choices of the completions API. Their log-probabilities are four lists with one entry for each token: the tokens' texts, their
log-probabilities, the likeliest tokens, and the text offsets."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from service.dialects.openai.chunks import Chunks
from service.dialects.openai.completion_schemas import CompletionRequest
from service.dialects.openai.token_json import TokenJson, slices, token_json
from service.dialects.resuming import AnswerStart
from service.generation.model import Generator
from service.generation.request import Delta, TokenLogprob
from service.generation.runs import Runs
from service.generation.text import Vocabulary
from service.http.answers import Elements, done
from service.streams.source import Received


class Columns:
    """The log-probabilities of a choice as four lists of JSON: token texts, log-probabilities, likeliest tokens, text offsets."""

    def __init__(self, tokens: TokenJson) -> None:
        self._tokens = tokens
        self._texts, self._own, self._tops, self._offsets = Elements(), Elements(), Elements(), Elements()

    def add(self, token_ids: Iterable[int], logprobs: Sequence[TokenLogprob | None], offsets: Iterable[int]) -> None:
        self._texts.add(self._tokens.texts(token_ids))
        self._own.add(self._tokens.own(logprobs))
        self._tops.add(self._tokens.tops(logprobs))
        self._offsets.add(",".join(map(str, offsets)).encode())

    def add_all(self, others: "Columns") -> None:
        for own, other in zip(self._lists, others._lists, strict=True):
            own.add_all(other)

    def json(self) -> dict[str, Any]:
        return {"tokens": self._texts, "token_logprobs": self._own, "top_logprobs": self._tops, "text_offset": self._offsets}

    @property
    def _lists(self) -> tuple[Elements, ...]:
        return self._texts, self._own, self._tops, self._offsets


class Logprobs:
    """Adds the log-probabilities of one choice to `Columns` while tokens arrive. Text offsets count from the beginning of the choice's
    text, which includes an echoed prompt."""

    def __init__(self, model: Generator, *, skip_special_tokens: bool) -> None:
        hidden = model.vocabulary.special if skip_special_tokens else frozenset[int]()
        self._tokens = token_json(model.vocabulary)
        self._offsets = _Offsets(model.vocabulary, hidden)

    def add_to(self, columns: Columns, logprobs: Iterable[TokenLogprob]) -> None:
        told = list(logprobs)
        ids = [each.token_id for each in told]
        columns.add(ids, told, map(self._offsets.of, ids))

    def prompt(self, columns: Columns, ids: Sequence[int], logprobs: Iterable[TokenLogprob | None]) -> Iterable[bytes]:
        """Add the log-probabilities of a prompt to `columns`. The first token's log-probability is None.

        Yields b"" after each slice, so that the caller can let other tasks run.
        """
        at = 0
        for some in slices(logprobs):
            these = ids[at : at + len(some)]
            columns.add(these, some, map(self._offsets.of, these))
            at += len(some)
            yield b""

    def after(self, ids: Sequence[int]) -> Iterable[bytes]:
        """Advance the text offset by the text of the tokens `ids`.

        Yields b"" after every 1,024 tokens, so that the caller can let other tasks run.
        """
        for at in range(0, len(ids), 1024):
            for token_id in ids[at : at + 1024]:
                self._offsets.of(token_id)
            yield b""

    def like(self, other: "Logprobs") -> None:
        """Set the text offset to the current offset of another choice."""
        self._offsets.like(other._offsets)


class _Offsets:
    """Computes each token's position in the text, in characters. Tokens that form one character together have that character's position."""

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int]) -> None:
        """`hidden` contains the ids of tokens that have no text in the answer."""
        self._vocabulary, self._hidden = vocabulary, hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def of(self, token_id: int) -> int:
        begin = self._at
        if token_id not in self._hidden:
            self._at += len(self._decoder.decode(self._vocabulary[token_id]))
        return begin

    def like(self, other: "_Offsets") -> None:
        self._at = other._at
        self._decoder.setstate(other._decoder.getstate())


class CompletionChunks(Chunks):
    """Builds the chunks of a completion, for a decoder or an encoder-decoder."""

    def __init__(self, body: CompletionRequest, model: Generator, runs: Runs, start: AnswerStart) -> None:
        super().__init__(model, runs, body.stream_options, start, object_="text_completion")
        self.body = body
        self.logprobs = [self.new_logprobs() for _ in runs.runs]  # one object for each choice

    def new_logprobs(self) -> Logprobs:
        return Logprobs(self.model, skip_special_tokens=self.body.skip_special_tokens)

    async def skip(self, index: int, part: Received) -> None:
        if self.body.logprobs is not None:
            await done(self.logprobs[index].after(part.token_ids))

    def choice(self, index: int, delta: Delta, columns: Columns | None = None) -> dict[str, Any]:
        """Return the JSON that a delta adds to a choice. If `columns` is given, it is sent in place of the delta's log-probabilities."""
        if columns is None and self.body.logprobs is not None:
            self.logprobs[index].add_to(columns := Columns(self.tokens), delta.logprobs)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": None if self.body.logprobs is None or columns is None else columns.json(),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self.state(index, delta),
        }
