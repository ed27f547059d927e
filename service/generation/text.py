"""Decodes tokens to text that can be sent: whole characters only, and nothing that might be the beginning of a stop string."""

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
_WIDEST = 21  # most tokens in a response for one position: the drawn token, and 20 alternatives with log-probabilities


class Vocabulary:
    """The bytes of every token, from a `tokenizers` file. Its decoder is byte-level (GPT-2), metaspace with byte-fallback, or plain
    concatenation.

    A token's bytes do not depend on its position. Some decoders drop the space before a text's first word; here it is kept, because
    the decoded text continues a prompt.

    `widest` and `widest_with_bytes` are the sizes of the largest tokens in a response, in bytes; see `_widest`.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        """Read the tokens of a `tokenizers` file. Raises BundleError if its kind of decoder does not decode each token by itself."""
        described: dict[str, Any] = orjson.loads(tokenizer_file.read_bytes())
        bytes_of = _reader(described.get("decoder"), tokenizer_file.name)
        self._bytes: dict[int, bytes] = {}
        vocabulary: Any = described["model"]["vocab"]
        if isinstance(vocabulary, list):  # true for Unigram, which has a list of pieces with their scores, in order of id
            vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
        added = {token["id"]: token for token in described.get("added_tokens", ())}
        for token, token_id in vocabulary.items():
            if token_id not in added:
                self._bytes[token_id] = bytes_of(token)
        self._bytes.update({token_id: token["content"].encode() for token_id, token in added.items()})
        self._texts: dict[int, str] = {}  # of the tokens that consist of whole characters
        for token_id, content in self._bytes.items():
            with suppress(UnicodeDecodeError):
                self._texts[token_id] = content.decode()
        self.special = frozenset(token_id for token_id, token in added.items() if token["special"])
        self.widest, self.widest_with_bytes = _widest(self._bytes, self._texts)

    def text(self, token_id: int) -> str | None:
        """Return the text of a token that consists of whole characters, else None."""
        return self._texts.get(token_id)

    def __getitem__(self, token_id: int) -> bytes:
        """Return a token's bytes; b"" for an id that the model has but the tokenizer does not."""
        return self._bytes.get(token_id, b"")


class TextStream:
    """The text of one run. The results of all `push` calls and `finish`, joined, are the whole text up to the stop string.

    The run ends at the first complete stop string, or at the longest if several end at the same character, however the text is divided into
    tokens. A stop string that becomes complete while the run may not stop yet (`may_stop` False) counts as ordinary text.
    """

    def __init__(self, vocabulary: Vocabulary, *, stop: tuple[str, ...], include_stop: bool, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._stop = stop
        self._first_letters = frozenset(string[0] for string in stop)
        self._longest = max(map(len, stop), default=0)
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_character = False  # True: the decoder holds an incomplete character
        self._held = ""
        self.stopped: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Return the text that can be sent now, often "". After a stop string it is always "". If `may_stop` is False, a stop string that
        this token completes does not end the run.
        """
        if self._skip_special_tokens and token_id in self._vocabulary.special:
            return ""
        text = None if self._in_character else self._vocabulary.text(token_id)
        if text is None:
            text = self._decoder.decode(self._vocabulary[token_id])
            self._in_character = bool(self._decoder.getstate()[0])
        return self._release(text, may_stop=may_stop) if self._stop else text

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Push several tokens, and return the text that can be sent now."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return the text that was held back. Call it at the end of the run. An incomplete character becomes U+FFFD."""
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
        """Yield (end, -length, stop string) for the first occurrence of each stop string that ends after `since`."""
        for string in self._stop:
            if (start := text.find(string, max(0, since - len(string) + 1))) >= 0:
                yield start + len(string), -len(string), string

    def _begin_of_stop(self, text: str) -> int:
        """Return the index at which the longest suffix of the text begins that may be the beginning of a stop string. Without such a
        suffix, return the text's length.
        """
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_letters and any(string.startswith(text[start:]) for string in self._stop):
                return start
        return len(text)


def _widest(pieces: Mapping[int, bytes], texts: Mapping[int, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes in bytes that the largest tokens have in JSON, descending, in two lists. In the first, a token is written as a
    string; in the second, as a string and a list of bytes. `texts` has the tokens that consist of whole characters.

    A token with an incomplete character is written as U+FFFD or in a form such as `bytes:\\xc3`; the larger size counts.
    """
    widths = []
    for token_id, piece in pieces.items():
        as_text = len(orjson.dumps(piece.decode(errors="replace")))
        widths.append((as_text if token_id in texts else max(as_text, 8 + 5 * len(piece)), len(piece)))
    with_bytes = (width + 4 * size for width, size in widths)
    return tuple(heapq.nlargest(_WIDEST, (width for width, _ in widths))), tuple(heapq.nlargest(_WIDEST, with_bytes))


def _reader(decoder: Any, file: str) -> Callable[[str], bytes]:
    """Return a function that decodes one token of the tokenizer file to bytes."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder] if decoder else []
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return partial(_letters_bytes, _byte_alphabet())
    if kinds == {"Fuse"}:  # true for a decoder that only concatenates
        return str.encode
    metaspace = "Metaspace" in kinds or any(step["type"] == "Replace" and step["content"] == " " for step in steps)
    if metaspace and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return _piece_bytes
    found = ", ".join(sorted(kinds)) or "none"
    raise BundleError(f"{file}: a decoder of text needs a byte-level or byte-fallback tokenizer; this one's decoder is: {found}")


def _letters_bytes(alphabet: Mapping[str, int], token: str) -> bytes:
    """Return the bytes of a token that is written in a byte alphabet. A token with any other letter is encoded as UTF-8, as in
    `tokenizers`.
    """
    if all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return token.encode()


def _piece_bytes(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_METASPACE, " ").encode()


def _byte_alphabet() -> Mapping[str, int]:
    """Return the byte for each letter of GPT-2's byte alphabet. A byte's letter is the character with this code if it is printable, else
    the next unused letter from U+0100 on (Radford et al. 2019).
    """
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {**{chr(byte): byte for byte in printing}, **{chr(256 + at): byte for at, byte in enumerate(others)}}
