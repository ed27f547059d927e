"""Serialises tokens and their log-probabilities as JSON. The JSON of each token is cached.

Every method of `TokenJson` returns the elements of a JSON list, separated by commas. `Columns` are the log-probabilities of completions:
four lists with one entry for each token.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import orjson

from service.generation.model import Generator
from service.generation.request import TokenLogprob
from service.generation.text import Vocabulary
from service.http.answers import Elements

LEAST_LOGPROB = -9999.0  # the number that OpenAI sends in place of minus infinity, which JSON does not have
_MOST_KEPT = 65_536  # maximum number of tokens in each cache


class TokenJson:
    """Serialises the tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        keep = lru_cache(maxsize=_MOST_KEPT)  # of JSON that depends only on the token
        self._named = keep(lambda at: f'{{"token":{self._replaced(at)},"bytes":{orjson.dumps(list(vocabulary[at])).decode()},"logprob":')
        self._by_id = keep(lambda at: f'"{at}":{{"decoded_token":{self._replaced(at)},"logprob":')
        self._texts = keep(lambda at: completions_text(vocabulary[at]))

    def chat(self, logprobs: Iterable[TokenLogprob]) -> bytes:
        """Serialise log-probabilities in the format of chat and responses."""
        named = self._named
        entries = []
        for each in logprobs:
            top = ",".join([f"{named(token_id)}{finite(logprob)!r}}}" for token_id, logprob in each.top])
            entries.append(f'{named(each.token_id)}{finite(each.logprob)!r},"top_logprobs":[{top}]}}')
        return ",".join(entries).encode()

    def prompt(self, logprobs: Iterable[TokenLogprob | None]) -> bytes:
        """Serialise a prompt's log-probabilities in vLLM's format. Each position is an object, whose keys are the ids of the actual token
        and of the likeliest tokens. A position without log-probabilities (None) is null."""
        by_id = self._by_id
        entries = []
        for each in logprobs:
            if each is None:
                entries.append("null")
                continue
            ranked = {token_id: (rank, logprob) for rank, (token_id, logprob) in enumerate(each.top, 1)}
            known = ranked if each.token_id in ranked else {each.token_id: (each.rank, each.logprob), **ranked}
            told = [
                f'{by_id(token_id)}{finite(logprob)!r},"rank":{"null" if rank is None else rank}}}'
                for token_id, (rank, logprob) in known.items()
            ]
            entries.append(f"{{{','.join(told)}}}")
        return ",".join(entries).encode()

    def texts(self, token_ids: Iterable[int]) -> bytes:
        """Serialise the texts of tokens as in completions. A token that is not whole UTF-8 characters is written as its bytes,
        `bytes:\\xc3`, since all such tokens would decode to U+FFFD."""
        return ",".join([self._texts(token_id) for token_id in token_ids]).encode()

    def own(self, logprobs: Iterable[TokenLogprob | None]) -> bytes:
        """Serialise the log-probability of each token, without alternatives."""
        return ",".join(["null" if each is None else repr(finite(each.logprob)) for each in logprobs]).encode()

    def tops(self, logprobs: Iterable[TokenLogprob | None]) -> bytes:
        """Serialise the likeliest tokens and the actual token by their text, as in completions. If several tokens
        have the same text, the last token's log-probability is used."""
        return ",".join(["null" if each is None else self._top(each) for each in logprobs]).encode()

    def _top(self, each: TokenLogprob) -> str:
        by_text = {self._texts(token_id): logprob for token_id, logprob in {each.token_id: each.logprob, **dict(each.top)}.items()}
        return f"{{{','.join([f'{text}:{finite(logprob)!r}' for text, logprob in by_text.items()])}}}"

    def _replaced(self, token_id: int) -> str:
        """Return a single token's text as JSON. Bytes that are not a whole character become U+FFFD."""
        return orjson.dumps(self._vocabulary[token_id].decode(errors="replace")).decode()


def completions_text(data: bytes) -> str:
    try:
        return orjson.dumps(data.decode()).decode()
    except UnicodeDecodeError:
        return json.dumps("bytes:" + "".join(f"\\x{byte:02x}" for byte in data))


@lru_cache(maxsize=64)
def token_json(vocabulary: Vocabulary) -> TokenJson:
    return TokenJson(vocabulary)


def slices(logprobs: Iterable[TokenLogprob | None], size: int = 64) -> Iterable[list[TokenLogprob | None]]:
    """Yield the log-probabilities in lists of at most `size` elements."""
    rest = iter(logprobs)
    while some := list(islice(rest, size)):
        yield some


def finite(logprob: float) -> float:
    """Return the log-probability, or -9999 if it is lower, since JSON has no minus infinity."""
    return max(LEAST_LOGPROB, logprob)


# Of completions ---------------------------------------------------------------------------------------------------------------------------


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
    """Adds the log-probabilities of one choice to `Columns` while tokens arrive. Text offsets count characters from the beginning of the
    choice's text, which includes an echoed prompt. Tokens that form one character together have that character's offset."""

    def __init__(self, model: Generator, *, skip_special_tokens: bool) -> None:
        self._vocabulary = model.vocabulary
        self._hidden = model.vocabulary.special if skip_special_tokens else frozenset[int]()  # tokens without text in the answer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def add_to(self, columns: Columns, logprobs: Iterable[TokenLogprob]) -> None:
        told = list(logprobs)
        ids = [each.token_id for each in told]
        columns.add(ids, told, map(self._offset, ids))

    def prompt(self, columns: Columns, ids: Sequence[int], logprobs: Iterable[TokenLogprob | None]) -> Iterable[bytes]:
        """Add the log-probabilities of a prompt to `columns`. The first token's log-probability is None.

        Yields b"" after each slice, so that the caller can let other tasks run.
        """
        at = 0
        for some in slices(logprobs):
            these = ids[at : at + len(some)]
            columns.add(these, some, map(self._offset, these))
            at += len(some)
            yield b""

    def after(self, ids: Sequence[int]) -> Iterable[bytes]:
        """Advance the text offset by the text of the tokens `ids`.

        Yields b"" after every 1,024 tokens, so that the caller can let other tasks run.
        """
        for at in range(0, len(ids), 1024):
            for token_id in ids[at : at + 1024]:
                self._offset(token_id)
            yield b""

    def _offset(self, token_id: int) -> int:
        """Return the offset of the next token, and advance by its text."""
        begin = self._at
        if token_id not in self._hidden:
            self._at += len(self._decoder.decode(self._vocabulary[token_id]))
        return begin
