"""The completions API's form of log-probabilities: four lists, an entry a token."""

import codecs
from collections.abc import Sequence
from typing import Any

from service.dialects import generation
from service.dialects.runs import Generator
from service.generation.request import TokenLogprob
from service.generation.text import Vocabulary


class Logprobs:
    """Of one choice, as its tokens come. Offsets count from the first of them."""

    def __init__(self, model: Generator, *, skip_special_tokens: bool) -> None:
        hidden = model.vocabulary.special if skip_special_tokens else frozenset[int]()
        self._vocabulary = model.vocabulary
        self._offsets = _Offsets(model.vocabulary, hidden)

    def of(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        return {
            "tokens": [self._token(token_id) for token_id, _ in tokens],
            "token_logprobs": [None if each is None else generation.finite(each.logprob) for _, each in tokens],
            "top_logprobs": [None if each is None else self._top(each) for _, each in tokens],
            "text_offset": [self._offsets.of(token_id) for token_id, _ in tokens],
        }

    def _top(self, each: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the drawn one, which may be none of them."""
        ids = {each.token_id: each.logprob, **dict(each.top)}
        return {self._token(token_id): generation.finite(logprob) for token_id, logprob in ids.items()}

    def _token(self, token_id: int) -> str:
        """The token's text; what is a part of a character is written as OpenAI does, `bytes:\\xc3`, since all parts look alike as text."""
        data = self._vocabulary[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


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
