"""Counts exact matches: an output is right if every digit is right and the end token follows the last digit."""

from collections.abc import Callable, Sequence
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.search import SearchOutputs
from models.training.number_words.batches import batch_of
from models.training.number_words.words import Example, in_words, is_held_out

Search = Callable[[EncoderDecoder, Tensor, Tensor], SearchOutputs]
ROWS = 200  # largest number of sequences in an evaluation batch
NUMBERS = 100  # largest number of examples for each language and number of digits


def exact(model: EncoderDecoder, tokenizer: Tokenizer, examples: Sequence[Example], search: Search) -> list[bool]:
    """Return for each example whether the output of `search` is exactly the example's number."""
    training = model.training
    model.eval()
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].words))
    right = [False] * len(examples)
    for begin in range(0, len(order), ROWS):
        rows = order[begin : begin + ROWS]
        batch = batch_of(tokenizer, [examples[i] for i in rows])
        found = search(model, batch.source, batch.mask).tokens
        ids = torch.where(batch.targets < 0, model.config.end_token_id, batch.targets)
        width = max(found.shape[1], ids.shape[1])
        same = (_filled(found, width, model) == _filled(ids, width, model)).all(dim=1)
        for i, is_right in zip(rows, same.tolist(), strict=True):
            right[i] = is_right
    model.train(training)
    return right


def held_out_numbers(n_digits: int, language: str, *, numbers: int = NUMBERS) -> list[Example]:
    """Draw distinct held-out numbers of `n_digits` digits, all equally likely. With three digits there are only 36 of them, so the result
    can have fewer than `numbers`.
    """
    random = Random(f"{language}/{n_digits}")
    heads = [head for head in range(100, 1000) if is_held_out(head)]
    tails = 10 ** (n_digits - 3)
    chosen = random.sample(range(len(heads) * tails), min(numbers, len(heads) * tails))
    found = [heads[i // tails] * tails + i % tails for i in chosen]
    return [Example(language, number, in_words(number, language)) for number in found]


def examples(languages: Sequence[str], *, max_digits: int) -> list[str]:
    """Return a short, a medium and a long source text in each language, as far as they have at most `max_digits` digits, as examples to
    store with a model.
    """
    numbers = [number for number in (7, 1_042, 987_654_321) if number < 10**max_digits]
    return [in_words(number, language) for language in languages for number in numbers]


def _filled(ids: Tensor, width: int, model: EncoderDecoder) -> Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=model.config.end_token_id)
