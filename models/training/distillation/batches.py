"""The batches of a distillation. A batch has texts of similar length, padded to the longest of them.

The texts are sorted by length and cut into batches once. The order of the batches is drawn from (seed, epoch). So the batch of a
step depends only on (seed, step), and a resumed run gets the same batches as an uninterrupted run.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.training.distillation.pieces import TextPiece
from service.errors import AttnserveError

LENGTH_STEP = 16  # for sorting, lengths in tokens are rounded down to a multiple of this
Batch = tuple[Tensor, Tensor]  # token ids (B, N) and mask (B, N), both int64


class TextError(AttnserveError, ValueError):
    """The texts are too short for the config. The message names the length and a remedy."""


def tokenize(pieces: Sequence[TextPiece], tokenizer: Tokenizer, *, longest: int) -> list[list[int]]:
    """Return the token ids of each piece, with special tokens, cut to `longest` tokens."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest)
    return [encoding.ids for encoding in tokenizer.encode_batch_fast([piece.text for piece in pieces])]


def padded(rows: Sequence[Sequence[int]]) -> Batch:
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return ids, (torch.arange(width) < torch.tensor([[len(row)] for row in rows])).long()


def cut_into_batches(rows: Sequence[Sequence[int]], *, tokens: int) -> list[list[int]]:
    """Sort the rows by length, cut them into batches, and return the row indices of each batch. A batch has at most `tokens` tokens,
    padding included, unless it is a single row that is longer.
    """
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]) // LENGTH_STEP, hashlib.sha256(str(rows[i]).encode()).digest()))
    batches: list[list[int]] = []
    width = 0
    for i in order:
        width = max(width, len(rows[i])) if batches else len(rows[i])
        if batches and (len(batches[-1]) + 1) * width <= tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
            width = len(rows[i])
    return batches


class TextBatches:
    """A callable: `batches(step)` returns the batch of a step of training. Raises TextError if all texts are shorter than `shortest`
    tokens.
    """

    def __init__(self, rows: Sequence[Sequence[int]], *, tokens: int, shortest: int, seed: int) -> None:
        self.rows = [row for row in rows if len(row) >= shortest]
        if not self.rows:
            raise TextError(f"none of {len(rows)} texts has shortest={shortest} tokens; collect longer ones, or lower it")
        self.batches, self.seed = cut_into_batches(self.rows, tokens=tokens), seed

    def __call__(self, step: int) -> Batch:
        epoch, at = divmod(step, len(self.batches))
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.batches))
        return padded([self.rows[i] for i in self.batches[order[at]]])
