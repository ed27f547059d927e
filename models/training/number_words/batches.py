"""Draws the training batches of number words from the seed and the step. A batch has rows of about the same length."""

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.training.number_words.tokens import BEGIN, END, PADDING, id_of, padded
from models.training.number_words.words import Example, draw

STEPS = 8  # the numbers for this many steps are drawn together, then sorted by length and cut into batches
FIRST_DIGITS = 3  # maximum number of digits at the first step


@dataclass(frozen=True)
class NumberWordsBatch:
    """A batch of B examples: the sources (B, N) with their mask, True = token, the `targets` (B, T), which are -100 after the end token,
    and `previous` (B, T), the token before each target."""

    source: Tensor
    mask: Tensor
    previous: Tensor
    targets: Tensor


class NumberWordsBatches:
    """Training batches. The numbers have at most 3 digits at step 0, and this maximum rises to `max_digits` at step `all_digits_from`."""

    def __init__(self, tokenizer: Tokenizer, *, batch: int, seed: int, languages: tuple[str, ...], max_digits: int, all_digits_from: int):
        self._tokenizer, self._batch, self._seed = tokenizer, batch, seed
        self._languages, self._max_digits, self._all_from = languages, max_digits, all_digits_from
        self._group: tuple[int, list[list[Example]]] = (-1, [])

    def __call__(self, step: int) -> NumberWordsBatch:
        group, place = divmod(step, STEPS)
        if self._group[0] != group:
            self._group = group, self._drawn(group)
        return batch_of(self._tokenizer, self._group[1][place])

    def digits(self, step: int) -> int:
        """Return the maximum number of digits at `step`."""
        if step >= self._all_from:
            return self._max_digits
        return min(self._max_digits, FIRST_DIGITS + (self._max_digits - FIRST_DIGITS + 1) * step // self._all_from)

    def _drawn(self, group: int) -> list[list[Example]]:
        random = Random(f"{self._seed}/{group}")
        max_digits = self.digits(group * STEPS)
        examples = [draw(random, max_digits=max_digits, languages=self._languages) for _ in range(STEPS * self._batch)]
        examples.sort(key=lambda example: len(example.words))
        batches = [examples[i : i + self._batch] for i in range(0, len(examples), self._batch)]
        random.shuffle(batches)
        return batches


def batch_of(tokenizer: Tokenizer, examples: list[Example]) -> NumberWordsBatch:
    """Convert the examples to padded tensors, one row for each example."""
    begin, end, padding = (id_of(tokenizer, token) for token in (BEGIN, END, PADDING))
    sources = [encoding.ids for encoding in tokenizer.encode_batch_fast([example.words for example in examples])]
    outputs = [[id_of(tokenizer, digit) for digit in str(example.number)] for example in examples]
    source = padded(sources, padding)
    return NumberWordsBatch(
        source=source,
        mask=torch.arange(source.shape[1]) < torch.tensor([len(ids) for ids in sources])[:, None],
        previous=padded([[begin, *ids] for ids in outputs], padding),
        targets=padded([[*ids, end] for ids in outputs], -100),
    )
