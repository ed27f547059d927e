"""Beginnings of a text. A text that will be cut is tokenised only as far as needed, if its tokenizer splits every text at spaces.

Then the tokens of a beginning that ends before a space are the first tokens of the whole text. That is certain for the parts of tokenizers
that are listed here, and for other tokenizers a text is read to its end.
"""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from service.tokenization.patterns import PUBLISHED

_LEAST = 4_096  # characters of the first beginning; shorter texts are read to their end
_CHARACTERS = 8  # of a token, more than in most texts
_ANYWAY = r"\s+(?!\S)"  # a part of the published patterns that split at white space
_SPLITTING = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Metaspace")
_LOCAL = ("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip", "StripAccents")


def beginnings(text: str, tokens: int) -> Iterator[str]:
    """Yield beginnings of a text that probably have so many tokens, each at least twice as long as the one before, and then the text."""
    size = max(_CHARACTERS * tokens, _LEAST)
    while 2 * size < len(text):
        at = text.find(" ", size, 2 * size)
        while at > 0 and not (text[at - 1].isalnum() or "!" <= text[at - 1] <= "~"):
            at = text.find(" ", at + 1, 2 * size)
        if at > 0:
            yield text[:at]
        size *= 2
    yield text


def splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether this tokenizer certainly tokenises what is before a space by itself."""
    if isinstance(tokenizer.model, BPE) and tokenizer.model.dropout:
        return False
    for token in tokenizer.get_added_tokens_decoder().values():
        hidden = token.special and tokenizer.encode_special_tokens
        if not hidden and any(map(str.isspace, token.content.lstrip())):
            return False
    parts = list(_parts(tokenizer.pre_tokenizer))
    return (
        any(map(_splits, parts))
        and all(_splits(part) or _divides(part) for part in parts)
        and all(map(_is_local, _parts(tokenizer.normalizer)))
    )


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    described = [] if part is None else [json.loads(part.__getstate__())]
    while described:
        first = described.pop(0)
        inner = first.get("pretokenizers", first.get("normalizers"))
        if inner is None:
            yield first
        else:
            described[:0] = inner


def _splits(part: dict[str, Any]) -> bool:
    kind = part["type"]
    if kind == "ByteLevel":
        return bool(part.get("use_regex", True))
    return part.get("split", True) is True if kind == "Metaspace" else kind in _SPLITTING or (_divides(part) and _ANYWAY in _regex(part))


def _divides(part: dict[str, Any]) -> bool:
    """Return whether the part only makes pieces smaller, without looking past a space."""
    if part["type"] == "Split":
        return _regex(part) in PUBLISHED and part["behavior"] == "Isolated" and not part.get("invert")
    return part["type"] in ("ByteLevel", "Digits", "Punctuation")


def _regex(part: dict[str, Any]) -> str:
    return str(part.get("pattern", {}).get("Regex", ""))


def _is_local(part: dict[str, Any]) -> bool:
    """Return whether this part of a normalizer changes no space into something else, and nothing beside a space by what is behind it."""
    if part["type"] != "Replace":
        return part["type"] in _LOCAL
    pattern = part["pattern"].get("String")
    if pattern is None:
        return _regex(part) in (r" {2,}", r"\s+", r"\s") and part["content"] == " "
    return not any(map(str.isspace, pattern))
