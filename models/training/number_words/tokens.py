"""Characters as tokens: the letters of all number words and the ten digits, in one vocabulary."""

from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from models.training.number_words.words import LANGUAGES, in_words

PADDING, BEGIN, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL = (PADDING, BEGIN, END, UNKNOWN)
# Every word of a number at every place, and several together.
NUMBERS = [word * place for word in (*range(100), *range(100, 1000, 100)) for place in (1, 1_000, 1_000_000, 1_001_001)]


def character_tokenizer() -> Tokenizer:
    """One token a character; capital letters are read as small ones, and characters of no language here as <unk>."""
    letters = sorted({letter for language in LANGUAGES for number in NUMBERS for letter in in_words(number, language)} | {*"0123456789"})
    tokenizer = Tokenizer(models.WordLevel({token: id_ for id_, token in enumerate((*SPECIAL, *letters))}, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Raises KeyError for a token that is not in the vocabulary."""
    if (number := tokenizer.token_to_id(token)) is None:
        raise KeyError(token)
    return number


def padded(sequences: Sequence[Sequence[int]], padding: int) -> Tensor:
    """(B, N) int64, N the longest."""
    longest = max(map(len, sequences))
    return torch.tensor([[*ids, *[padding] * (longest - len(ids))] for ids in sequences])
