"""Measures a decoder on long texts: bits per byte by length, a needle to find, a text to copy, and continuations.

One pass over a text of 8,192 tokens gives the figures of all shorter lengths: those of its first tokens.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from models.attention.layers.causal import State
from models.decoder.model import Decoder

LENGTHS = (256, 512, 1_024, 2_048, 4_096, 8_192)
PIECE = 255  # tokens of a call
NEEDLE_AT = (400, 1_200, 2_400)  # tokens between the needle and its question
COPY_AT = (400, 1_200, 2_400)  # tokens between the beginnings of a list of words and of its copy
WORDS = ["river", "stone", "apple", "cloud", "tiger", "paper", "green", "music", "chair", "bread", "silver", "window", "garden", "forest"]
SAMPLE_TOKENS = 40


@dataclass
class Reader:
    """A decoder that reads a text in pieces, for which it needs only as much memory as a piece."""

    decoder: Decoder

    @torch.inference_mode()
    def bits(self, ids: Sequence[int], show: Callable[[int], None] = lambda done: None) -> list[float]:
        """Return -log2 of the probability of each token but the first."""
        states: list[State] | None = None
        bits: list[float] = []
        for begin in range(0, len(ids) - 1, PIECE):
            piece, targets = ids[begin : begin + PIECE], ids[begin + 1 : begin + 1 + PIECE]
            piece = piece[: len(targets)]
            logits, states = self.decoder(torch.tensor([piece]), None, states, torch.tensor([begin]))
            bits += (F.cross_entropy(logits[0], torch.tensor(targets), reduction="none") / math.log(2)).tolist()
            show(begin + len(piece))
        return bits

    @torch.inference_mode()
    def continued(self, ids: Sequence[int], n: int) -> list[int]:
        """Return the n most probable next tokens, one after the other."""
        states: list[State] | None = None
        position, fresh, said = 0, list(ids), list[int]()
        while len(said) < n:
            for begin in range(0, len(fresh), PIECE):
                piece = fresh[begin : begin + PIECE]
                logits, states = self.decoder(
                    torch.tensor([piece]), None, states, torch.tensor([position]), wanted=torch.tensor([[len(piece) - 1]])
                )
                position += len(piece)
            said.append(int(logits[0, -1].argmax()))
            fresh = said[-1:]
        return said


def bits_per_byte(reader: Reader, ids: Sequence[int], tokenizer: Tokenizer, lengths: Sequence[int] = LENGTHS) -> dict[str, float]:
    """Return the bits per byte of the first N tokens of a text, for every N of `lengths` that it has."""
    bits = reader.bits(ids[: max(lengths)])
    return {
        str(N): sum(bits[: N - 1]) / len(tokenizer.decode(ids[1:N], skip_special_tokens=False).encode()) for N in lengths if len(ids) >= N
    }


def needle(reader: Reader, filler: Sequence[int], tokenizer: Tokenizer, distance: int) -> float:
    """Hide a number of five digits in a text, and ask for it after `distance` tokens. Return the bits of the number; a guess has 16.6."""
    number = str(random.Random(distance).randint(10_000, 99_999))
    begin, question, answer = (
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in (f"\n# The secret number is {number}. Remember it.\n", "\n# The secret number is ", number)
    )
    bits = reader.bits([*filler[:100], *begin, *filler[100 : 100 + distance], *question, *answer])
    return sum(bits[-len(answer) :])


def copy(reader: Reader, filler: Sequence[int], tokenizer: Tokenizer, distance: int) -> float:
    """Return the bits per token of a list of words that the text has had before, `distance` tokens earlier. The first four tokens, after
    which the list can be recognised, do not count."""
    words = WORDS * 2
    random.Random(1).shuffle(words)
    ids = tokenizer.encode("\nWords: " + " ".join(words) + ".\n", add_special_tokens=False).ids
    bits = reader.bits([*filler[:100], *ids, *filler[100 : 100 + max(distance - len(ids), 0)], *ids])
    counted = bits[-len(ids) + 4 :]
    return sum(counted) / len(counted)
