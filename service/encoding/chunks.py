"""Chunks of a text, each with a vector that knows the whole text ("late chunking", arXiv 2409.04701).

The encoder reads the whole text once, and the vector of a chunk is the mean of the vectors of its tokens, brought to length 1. Only if an
encoder's own vector is such a mean, vectors of chunks are in the same space.

A text that is longer than the encoder reads is read in windows, a quarter of which repeat the end of the window before. Of tokens in two
windows, the vectors of the first are used, since they follow more text.
"""

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from service.errors import BatchTooLarge, EmptyInput, InvalidRequest
from service.runtime.onnx import Array
from service.tokenization.texts import TextEncoder

Span = tuple[int, int]  # the first character of a part of a text, and the one after its last
_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n\s*")
MOST_CHUNKS, MOST_CHUNK_TOKENS = 16_384, 2**20  # of one request
_REPEATED = 4  # this part of a window repeats the window before


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """How a text is split: in chunks of at most `size` tokens, of which at most `overlap` are in the chunk before too. "sentences" are kept
    whole if they have at most `size` tokens."""

    size: int = 256
    overlap: int = 0
    by: Literal["tokens", "sentences"] = "tokens"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a text: its characters, and its tokens, counted without special tokens and those of a prompt."""

    characters: Span
    tokens: Span


class TokenisedText:
    """The tokens of one text, with their characters, in the windows that an encoder reads."""

    def __init__(self, texts: TextEncoder, text: str, *, prompt: str = "", index: int = 0) -> None:
        """`index`: the text's index in its request, for errors. Takes time in proportion to the length of the text."""
        if not text:
            raise EmptyInput(f"input {index} cannot be empty", param="input")
        (encoding,) = texts.tokenizer.encode_batch([prompt + text])
        special = np.array(encoding.special_tokens_mask, bool)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) - len(prompt)
        content = np.flatnonzero(~special & (offsets[:, 1] > 0))
        if not len(content):
            raise EmptyInput(f"input {index} has no tokens", param="input")
        first, last = int(content[0]), int(content[-1]) + 1
        self.text, self.index = text, index
        self.n_tokens = last - first
        self._starts: NDArray[np.int64] = np.maximum(offsets[first:last, 0], 0)
        self._ends: NDArray[np.int64] = offsets[first:last, 1]
        ids = encoding.ids
        self.before, self.after = ids[:first], ids[last:]  # special tokens and those of the prompt; special tokens at the end
        self.n_special_before = int(special[:first].sum())
        room = texts.max_tokens - len(self.before) - len(self.after)
        if room < 2:
            raise InvalidRequest(
                f"the prompt takes {len(self.before)} of the {texts.max_tokens} tokens that the model reads: shorten it", param="prompt"
            )
        step = room if self.n_tokens <= room else room - room // _REPEATED
        self.spans_of_windows = [(at, min(at + room, self.n_tokens)) for at in range(0, max(self.n_tokens - room + step, 1), step)]
        self._content = ids[first:last]

    @property
    def windows(self) -> list[list[int]]:
        """Return the token ids of each window, with special tokens and prompt."""
        return [[*self.before, *self._content[first:last], *self.after] for first, last in self.spans_of_windows]

    def chunk(self, span: Span) -> Chunk:
        """Return the chunk of these characters. A token belongs to the chunk that has its first character. Raises InvalidRequest if the
        span leaves the text or has no token."""
        start, end = span
        if not 0 <= start < end <= len(self.text):
            raise InvalidRequest(
                f"span [{start}, {end}] of input {self.index} is empty or leaves the text, which has {len(self.text)} characters: "
                "spans are [start, end] with 0 <= start < end <= length",
                param="chunks.spans",
            )
        first, last = np.searchsorted(self._starts, (start, end)).tolist()
        if first == last:
            raise InvalidRequest(
                f"span [{start}, {end}] of input {self.index} has no token of its own, so it has no vector: widen it", param="chunks.spans"
            )
        return Chunk((start, end), (first, last))

    def of_spans(self, spans: Sequence[Span]) -> list[Chunk]:
        """Return the chunks of spans, which must be in order and may not overlap."""
        for (start, end), (following, its_end) in pairwise(spans):
            if following < end:
                raise InvalidRequest(
                    f"spans [{start}, {end}] and [{following}, {its_end}] of input {self.index} overlap or are not in order: "
                    "end each span before the next one begins",
                    param="chunks.spans",
                )
        return [self.chunk(span) for span in spans]

    def split(self, how: Splitting) -> list[Chunk]:
        """Return the chunks of the whole text. A chunk costs two searches, however long it is. Raises BatchTooLarge for too many."""
        borders = self._sentences(how.size) if how.by == "sentences" else range(self.n_tokens + 1)
        chunks, first = list[Chunk](), 0
        while True:
            last = max(bisect.bisect_right(borders, borders[first] + how.size) - 1, first + 1)
            begin, end = borders[first], borders[last]
            chunks.append(Chunk(self._characters(begin, end), (begin, end)))
            check_work(len(chunks), len(chunks) * how.size if how.overlap else 0)
            if last == len(borders) - 1:
                return chunks
            first = min(max(bisect.bisect_left(borders, end - how.overlap), first + 1), last)

    def _characters(self, first: int, last: int) -> Span:
        return int(self._starts[first]), int(self._ends[last - 1])

    def _sentences(self, most: int) -> list[int]:
        """Return the first token of each sentence, and the number of tokens. A sentence of more than `most` tokens is cut."""
        borders = np.searchsorted(self._starts, [0, *(found.end() for found in _SENTENCE.finditer(self.text)), len(self.text)])
        sentences = pairwise(np.unique(borders).tolist())
        return [*(at for first, last in sentences for at in range(first, last, most)), self.n_tokens]


def check_work(chunks: int, tokens: int) -> None:
    """Raise BatchTooLarge if a request may not have so many chunks, or chunks of so many tokens in total."""
    if chunks > MOST_CHUNKS or tokens > MOST_CHUNK_TOKENS:
        raise BatchTooLarge(
            f"a request has at most {MOST_CHUNKS} chunks, of {MOST_CHUNK_TOKENS} tokens in total; this one has more: choose larger chunks "
            "with less overlap, or send the texts in parts",
            param="chunks",
        )


class ChunkVectors:
    """The vectors of one text's chunks, while the token vectors of its windows arrive in order."""

    def __init__(self, text: TokenisedText, chunks: Sequence[Chunk]) -> None:
        """`chunks`: in the order of their first tokens."""
        self._text, self._chunks = text, chunks
        self._starts, self._ends = ([chunk.tokens[end] for chunk in chunks] for end in (0, 1))
        self._sums: list[NDArray[np.float64] | None] = [None] * len(chunks)
        self._counts = [0] * len(chunks)
        self._windows = 0
        self._done = 0  # number of the text's tokens whose vectors have arrived

    def add(self, rows: Array) -> None:
        """Add the token vectors (N, D) of the next window. The first chunk has the special tokens before the text too, the last one those
        after it, as in the reference of arXiv 2409.04701."""
        text, first, last = self._text, *self._text.spans_of_windows[self._windows]
        before, after = len(text.before), len(text.after)
        if not self._windows:
            self._count(0, rows[: text.n_special_before])
        self._windows += 1
        if self._windows == len(text.spans_of_windows):
            self._count(len(self._chunks) - 1, rows[len(rows) - after :])
        for at in range(bisect.bisect_right(self._ends, self._done), bisect.bisect_left(self._starts, last)):
            begin, end = max(self._starts[at], self._done), min(self._ends[at], last)
            self._count(at, rows[before + begin - first : before + end - first])
        self._done = last

    def _count(self, at: int, rows: Array) -> None:
        total = rows.sum(axis=0, dtype=np.float64)
        known = self._sums[at]
        self._sums[at] = total if known is None else known + total
        self._counts[at] += len(rows)

    def all(self) -> list[Array]:
        """Return the vector of each chunk, (D,) float32 of length 1."""
        means = [total / count for total, count in zip(self._sums, self._counts, strict=True) if total is not None]
        return [(mean / max(float(np.linalg.norm(mean)), 1e-12)).astype(np.float32) for mean in means]


def joined(texts: Sequence[str]) -> tuple[str, list[Span]]:
    """Return texts joined by spaces to one text, and the span of each."""
    return " ".join(texts), list(_spans(texts))


def _spans(texts: Sequence[str]) -> Iterator[Span]:
    at = 0
    for text in texts:
        yield at, at + len(text)
        at += len(text) + 1
