"""The completions API's form of log-probabilities: four lists with an entry per token."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from service.dialects.openai.token_json import TokenJson, slices, token_json
from service.generation.request import TokenLogprob
from service.generation.runs import Generator
from service.generation.text import Vocabulary
from service.http.answers import Elements


class Columns:
    """The four lists, already JSON."""

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
    """Log-probabilities of one choice, as its tokens arrive. Offsets count from the first token."""

    def __init__(self, model: Generator, *, skip_special_tokens: bool) -> None:
        hidden = model.vocabulary.special if skip_special_tokens else frozenset[int]()
        self._tokens = token_json(model.vocabulary)
        self._offsets = _Offsets(model.vocabulary, hidden)

    def columns(self, logprobs: Iterable[TokenLogprob]) -> Columns:
        """The lists of the next tokens."""
        columns = Columns(self._tokens)
        self.add_to(columns, logprobs)
        return columns

    def add_to(self, columns: Columns, logprobs: Iterable[TokenLogprob]) -> None:
        told = list(logprobs)
        ids = [each.token_id for each in told]
        columns.add(ids, told, map(self._offsets.of, ids))

    def prompt(self, columns: Columns, ids: Sequence[int], logprobs: Iterable[TokenLogprob | None]) -> Iterable[bytes]:
        """Add the log-probabilities of a prompt, step by step. The first token has none."""
        at = 0
        for some in slices(logprobs):
            these = ids[at : at + len(some)]
            columns.add(these, some, map(self._offsets.of, these))
            at += len(some)
            yield b""

    def after(self, ids: Sequence[int]) -> Iterable[bytes]:
        """Advance the offset by the tokens of a prompt, step by step."""
        for at in range(0, len(ids), 1024):
            for token_id in ids[at : at + 1024]:
                self._offsets.of(token_id)
            yield b""

    def like(self, other: "Logprobs") -> None:
        """Continue at the current offset of another choice."""
        self._offsets.like(other._offsets)


class _Offsets:
    """Where each token begins in the text, in characters. Tokens that share a character begin where it begins."""

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int]) -> None:
        """`hidden`: tokens that are not in the text."""
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
