"""Measures the bits per byte of a text under the graph that will be served, as training does (models/training/text/evaluation.py).

A document begins with the begin-of-text token, or else the end token, and an empty state, which is kept for the whole document. With
limited positions, it is cut into windows of that many tokens, each with an empty state. Every token after the first, and the end token,
count once.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from export import contract
from export.checks.decoder_parity import Ids, Steps, Values
from export.errors import ExportError
from models.training.corpus import read_texts

Show = Callable[[float], None]  # called with the fraction of the work that is done

CHUNK = 256  # number of tokens of one document in a call
ROWS = 16  # number of documents in a batch
LOGITS = 1 << 24  # largest number of logits in one call: 64 MB of float32


@dataclass(frozen=True)
class HeldOutText:
    """Documents on which bits per byte are measured."""

    name: str
    documents: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(document.encode()) for document in self.documents)

    @property
    def described(self) -> contract.HeldOut:
        sha256 = hashlib.sha256("".join(self.documents).encode()).hexdigest()
        return contract.HeldOut(name=self.name, documents=len(self.documents), size_bytes=self.size_bytes, sha256=sha256)


def read_text(path: Path) -> HeldOutText:
    """Read a UTF-8 file as one document, or the held-out documents of a data folder. Raises ExportError for a file without text, and
    CorpusError for a folder that is not a data folder.
    """
    if path.is_dir():
        return HeldOutText(path.resolve().name, tuple(document.text for document in read_texts(path, "held_out")))
    try:
        document = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; give another text") from error
    if not document:
        raise ExportError(f"{path} is empty; give a text that the model was not trained on")
    return HeldOutText(path.name, (document,))


def bits_per_byte(
    steps: Steps,
    tokenizer: Tokenizer,
    text: HeldOutText,
    *,
    bos_token_id: int | None,
    eos_token_id: int | None,
    show: Show = lambda share: None,
) -> float:
    """Return the bits of all documents divided by their bytes. If `bos_token_id` is None, documents begin with `eos_token_id`."""
    end = [] if eos_token_id is None else [eos_token_id]
    begin = end if bos_token_id is None else [bos_token_id]
    rows = [row for ids in _encoded(tokenizer, text) for row in _windows(np.array([*begin, *ids, *end]), steps.n_positions)]
    rows.sort(key=len, reverse=True)  # so that a batch has documents of similar length
    chunk = min(CHUNK, max(1, LOGITS // tokenizer.get_vocab_size()))
    beside = min(ROWS, max(1, LOGITS // (chunk * tokenizer.get_vocab_size())))
    bits, done, total = 0.0, 0, sum(map(len, rows))
    for start in range(0, len(rows), beside):
        group = rows[start : start + beside]
        bits += _bits(steps, group, chunk)
        done += sum(map(len, group))
        show(done / max(total, 1))
    return bits / text.size_bytes


def _encoded(tokenizer: Tokenizer, text: HeldOutText) -> list[list[int]]:
    """Return the token ids of each document, without the special tokens that the tokenizer would add."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(text.documents), add_special_tokens=False)]


def _windows(tokens: Ids, n_positions: int | None) -> list[Ids]:
    """Cut a document into windows of `n_positions` inputs and a last target, so that each token but the first is predicted once."""
    longest = n_positions or len(tokens)
    return [tokens[start : start + longest + 1] for start in range(0, max(len(tokens) - 1, 1), max(longest, 1))]


def _bits(steps: Steps, rows: Sequence[Ids], chunk: int) -> float:
    """Return the sum of bits of all tokens except the first of each row. Each row is (n_i,), and the longest comes first."""
    lengths = np.array([len(row) - 1 for row in rows])  # input tokens: the last token is only a target
    padded = np.zeros((len(rows), len(rows[0])), np.int64)
    for row, place in zip(rows, padded, strict=True):
        place[: len(row)] = row
    states, bits = steps.begin(len(rows)), 0.0
    for start in range(0, int(lengths[0]), chunk):
        # Number of rows that are not finished; they are the first ones, because the longest rows come first.
        B = int((lengths > start).sum())
        states = {name: state[:B] for name, state in states.items()}
        here = padded[:B, start : start + chunk + 1]
        tokens, targets = here[:, :-1], here[:, 1:]
        left = np.minimum(lengths[:B] - start, tokens.shape[1])
        logits, states = steps.run(tokens, left, np.full(B, start), states)
        is_token = np.arange(tokens.shape[1]) < left[:, None]  # (B, N)
        bits += float(_surprise(logits[is_token], targets[is_token]).sum())
    return bits


def _surprise(logits: Values, targets: Ids) -> NDArray[np.float64]:
    """Return -log2 of the probability of each target: (T, V), (T,) -> (T,)."""
    below = logits - logits.max(axis=1, keepdims=True)
    of_target = below[np.arange(len(targets)), targets].astype(np.float64)
    bits: NDArray[np.float64] = (np.log(np.exp(below).sum(axis=1, dtype=np.float64)) - of_target) / np.log(2)
    return bits
