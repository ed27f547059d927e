"""A tokenizer with one token per character. Its vocabulary has the letters of all number words and the ten digits."""

from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from models.training.number_words.words import LANGUAGES, in_words

PADDING, BEGIN, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL = (PADDING, BEGIN, END, UNKNOWN)
# Numbers whose words together contain every character of the number words.
NUMBERS = [word * place for word in (*range(100), *range(100, 1000, 100)) for place in (1, 1_000, 1_000_000, 1_001_001)]


def character_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per character. It lowercases the text, and unknown characters become <unk>."""
    letters = sorted({letter for language in LANGUAGES for number in NUMBERS for letter in in_words(number, language)} | {*"0123456789"})
    tokenizer = Tokenizer(models.WordLevel({token: id_ for id_, token in enumerate((*SPECIAL, *letters))}, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token. Raises KeyError if the token is not in the vocabulary."""
    if (number := tokenizer.token_to_id(token)) is None:
        raise KeyError(token)
    return number


def padded(sequences: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Pad the sequences at the end to the longest length N, as int64 (B, N)."""
    longest = max(map(len, sequences))
    return torch.tensor([[*ids, *[padding] * (longest - len(ids))] for ids in sequences])
