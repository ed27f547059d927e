"""From tokens to text that may leave: whole characters only, and nothing that might yet become a stop string."""

import codecs
import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from export.contract import BundleError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "▁"
_WIDEST = 21  # tokens: as many as a place has with its log-probabilities


class Vocabulary:
    """The bytes of every token, from a `tokenizers` file whose decoder is byte-level (GPT-2), metaspace with byte-fallback, or
    none but putting tokens together.

    Bytes do not depend on their place: a decoder that would take away the blank before the first word of a text leaves it here, because
    what is decoded is the continuation of another text.

    `widest` and `widest_with_bytes`: how many bytes tokens can take in an answer, see `_widest`.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        """BundleError for a tokenizer whose tokens have no bytes of their own."""
        described: dict[str, Any] = orjson.loads(tokenizer_file.read_bytes())
        bytes_of = _reader(described.get("decoder"), tokenizer_file.name)
        self._bytes: dict[int, bytes] = {}
        vocabulary: Any = described["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pieces with their scores, in the order of their ids
            vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
        added = {token["id"]: token for token in described.get("added_tokens", ())}
        for token, token_id in vocabulary.items():
            if token_id not in added:
                self._bytes[token_id] = bytes_of(token)
        self._bytes.update({token_id: token["content"].encode() for token_id, token in added.items()})
        self._texts = _whole(self._bytes)
        self.special = frozenset(token_id for token_id, token in added.items() if token["special"])
        self.widest, self.widest_with_bytes = _widest(self._bytes.values())

    def text(self, token_id: int) -> str | None:
        """Of a token that is whole characters."""
        return self._texts.get(token_id)

    def __getitem__(self, token_id: int) -> bytes:
        """Of an id that the model has and the tokenizer has not: nothing."""
        return self._bytes.get(token_id, b"")


class TextStream:
    """The text of one run. What the pushes and `finish` return, one after the other, is the whole text up to the stop string.

    The stop string is the one that is complete first, and of those that end together the longest, however the tokens cut the text. One
    that is complete before it may end the run is text like any other.
    """

    def __init__(self, vocabulary: Vocabulary, *, stop: tuple[str, ...], include_stop: bool, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._stop = stop
        self._first_letters = frozenset(string[0] for string in stop)
        self._longest = max(map(len, stop), default=0)
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_character = False  # the decoder has the beginning of one
        self._held = ""
        self.stopped: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that may leave now, often none. After a stop string there is no more; without `may_stop` none ends with this token."""
        if self._skip_special_tokens and token_id in self._vocabulary.special:
            return ""
        text = None if self._in_character else self._vocabulary.text(token_id)
        if text is None:
            text = self._decoder.decode(self._vocabulary[token_id])
            self._in_character = bool(self._decoder.getstate()[0])
        return self._release(text, may_stop=may_stop) if self._stop else text

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The same for several tokens."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """What was held back, since nothing comes after it. A character that is not complete becomes U+FFFD."""
        text = self._release(self._decoder.decode(b"", final=True), may_stop=True) + self._held
        self._held = ""
        return text

    def _release(self, new: str, *, may_stop: bool) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + new
        if not self._stop:
            return text
        if may_stop and (found := list(self._ending_in(text, since=len(self._held)))):
            end, minus_length, self.stopped = min(found)
            self._held = ""
            return text[: end if self._include_stop else end + minus_length]
        held = self._begin_of_stop(text)
        self._held = text[held:]
        return text[:held]

    def _ending_in(self, text: str, *, since: int) -> Iterator[tuple[int, int, str]]:
        """(end, -length, stop string) of each that ends beyond `since`, at its first place there."""
        for string in self._stop:
            if (start := text.find(string, max(0, since - len(string) + 1))) >= 0:
                yield start + len(string), -len(string), string

    def _begin_of_stop(self, text: str) -> int:
        """Where the longest end of the text begins that is also the beginning of a stop string; its length if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_letters and any(string.startswith(text[start:]) for string in self._stop):
                return start
        return len(text)


def _widest(pieces: Iterable[bytes]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bytes of the widest tokens written in JSON, widest first: as a string, and as a string and a list of numbers.

    A token that is part of a character is written as a replacement character or as `bytes:\\xc3`, whichever is wider.
    """
    widths = []
    for piece in pieces:
        as_text = len(orjson.dumps(piece.decode(errors="replace")))
        widths.append((as_text if _is_text(piece) else max(as_text, 8 + 5 * len(piece)), len(piece)))
    with_bytes = (width + 4 * size for width, size in widths)
    return tuple(heapq.nlargest(_WIDEST, (width for width, _ in widths))), tuple(heapq.nlargest(_WIDEST, with_bytes))


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _whole(pieces: Mapping[int, bytes]) -> dict[int, str]:
    """The texts of those that are whole characters."""
    texts: dict[int, str] = {}
    for token_id, content in pieces.items():
        with suppress(UnicodeDecodeError):
            texts[token_id] = content.decode()
    return texts


def _reader(decoder: Any, file: str) -> Callable[[str], bytes]:
    """How the decoder of a tokenizer file turns one token into bytes."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder] if decoder else []
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return partial(_letters_bytes, _byte_alphabet())
    if kinds == {"Fuse"}:  # characters or words as they are
        return str.encode
    metaspace = "Metaspace" in kinds or any(step["type"] == "Replace" and step["content"] == " " for step in steps)
    if metaspace and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return _piece_bytes
    found = ", ".join(sorted(kinds)) or "none"
    raise BundleError(f"{file}: a decoder of text needs a byte-level or byte-fallback tokenizer; this one's decoder is: {found}")


def _letters_bytes(alphabet: Mapping[str, int], token: str) -> bytes:
    """A token that is not written in the alphabet stands for its own text, as in `tokenizers`."""
    if all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return token.encode()


def _piece_bytes(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_METASPACE, " ").encode()


def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's letter for each byte: itself where it prints, else the next letter from U+0100 on (Radford et al. 2019)."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {**{chr(byte): byte for byte in printing}, **{chr(256 + at): byte for at, byte in enumerate(others)}}
