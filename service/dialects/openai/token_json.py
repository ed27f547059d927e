"""Tokens and their log-probabilities as JSON. Each token of a vocabulary is encoded once, and alternatives need no Python objects.

Every function returns the elements of a list, separated by commas.
"""

import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice

import orjson

from service.generation.request import TokenLogprob
from service.generation.text import Vocabulary

LEAST_LOGPROB = -9999.0  # sent by OpenAI for minus infinity, which JSON does not have
_MOST_KEPT = 65_536  # cached tokens of each form


class _Forms(dict[int, str]):
    """The beginning of a token's entry, by id."""

    def __init__(self, write: Callable[[int], str]) -> None:
        self._write = write

    def __missing__(self, token_id: int) -> str:
        written = self._write(token_id)
        if len(self) < _MOST_KEPT:
            self[token_id] = written
        return written


class TokenJson:
    """Serialises the tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._named = _Forms(lambda at: f'{{"token":{self._replaced(at)},"bytes":{_numbers(vocabulary[at])},"logprob":')
        self._by_id = _Forms(lambda at: f'"{at}":{{"decoded_token":{self._replaced(at)},"logprob":')
        self._texts = _Forms(self._text)

    def chat(self, logprobs: Iterable[TokenLogprob]) -> bytes:
        """Chat's and responses' form."""
        named = self._named
        entries = []
        for each in logprobs:
            top = ",".join([f"{named[token_id]}{_finite(logprob)!r}}}" for token_id, logprob in each.top])
            entries.append(f'{named[each.token_id]}{_finite(each.logprob)!r},"top_logprobs":[{top}]}}')
        return ",".join(entries).encode()

    def prompt(self, logprobs: Iterable[TokenLogprob | None]) -> bytes:
        """vLLM's form: for each token of the prompt, by id, the token itself and the likeliest ones. The first has none."""
        by_id = self._by_id
        entries = []
        for each in logprobs:
            if each is None:
                entries.append("null")
                continue
            ranked = {token_id: (rank, logprob) for rank, (token_id, logprob) in enumerate(each.top, 1)}
            known = ranked if each.token_id in ranked else {each.token_id: (each.rank, each.logprob), **ranked}
            told = [
                f'{by_id[token_id]}{_finite(logprob)!r},"rank":{"null" if rank is None else rank}}}'
                for token_id, (rank, logprob) in known.items()
            ]
            entries.append(f"{{{','.join(told)}}}")
        return ",".join(entries).encode()

    def texts(self, token_ids: Iterable[int]) -> bytes:
        """Completions' form of tokens: a part of a character is written as `bytes:\\xc3`, since all parts decode to U+FFFD."""
        return ",".join([self._texts[token_id] for token_id in token_ids]).encode()

    def own(self, logprobs: Iterable[TokenLogprob | None]) -> bytes:
        """The log-probabilities of the tokens themselves."""
        return ",".join(["null" if each is None else repr(_finite(each.logprob)) for each in logprobs]).encode()

    def tops(self, logprobs: Iterable[TokenLogprob | None]) -> bytes:
        """Completions' form: by text, the likeliest tokens and the drawn one, which may be none of them; of equal texts the last one."""
        return ",".join(["null" if each is None else self._top(each) for each in logprobs]).encode()

    def _top(self, each: TokenLogprob) -> str:
        by_text = {self._texts[token_id]: logprob for token_id, logprob in {each.token_id: each.logprob, **dict(each.top)}.items()}
        return f"{{{','.join([f'{text}:{_finite(logprob)!r}' for text, logprob in by_text.items()])}}}"

    def _replaced(self, token_id: int) -> str:
        """A single token as text; bytes that are not a whole character become U+FFFD."""
        return orjson.dumps(self._vocabulary[token_id].decode(errors="replace")).decode()

    def _text(self, token_id: int) -> str:
        return completions_text(self._vocabulary[token_id])


def completions_text(data: bytes) -> str:
    try:
        return orjson.dumps(data.decode()).decode()
    except UnicodeDecodeError:
        return json.dumps("bytes:" + "".join(f"\\x{byte:02x}" for byte in data))


@lru_cache(maxsize=64)
def token_json(vocabulary: Vocabulary) -> TokenJson:
    return TokenJson(vocabulary)


def slices(logprobs: Iterable[TokenLogprob | None], size: int = 64) -> Iterable[list[TokenLogprob | None]]:
    """The entries in lists of `size`."""
    rest = iter(logprobs)
    while some := list(islice(rest, size)):
        yield some


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)


def _numbers(data: bytes) -> str:
    return str(list(data)).replace(" ", "")
