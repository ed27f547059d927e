"""A tokenizer with one token per byte. It needs no training, so decoders with random weights can use it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer, which has 256 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
