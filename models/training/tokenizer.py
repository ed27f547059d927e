"""Byte-level byte-pair encoding for Python code. It can encode every text without loss.

Text is first split into pieces, and no token crosses the borders between pieces. A piece is a line end, the whole indentation of a line
(so that 8 or 12 spaces can be one token), a name with its underscores and the space before it, a single digit, or several other signs in a
row. Prompts mostly end at such a border. A prompt that ends in `:`, in a newline or in the indentation gets the same tokens as the text
from which it was cut.
Sennrich et al. 2016, arXiv:1508.07909; bytes as the alphabet: Radford et al. 2019 (GPT-2).
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from service.errors import AttnserveError

END_OF_TEXT = "<|endoftext|>"
PIECES = "|".join(
    (
        r"[^\S\n]*\n+",  # line ends, with the spaces before them
        r"(?<=\n)[^\S\n]+",  # indentation
        r" ?[\p{L}\p{M}_]+",  # names and words
        r" ?\p{N}",  # single digits
        r" ?[^\s\p{L}\p{M}\p{N}_]+",  # operators, brackets, quotes
        r"[^\S\n]+(?!\S)",
        r"[^\S\n]+",
    )
)


class TokenizerError(AttnserveError, ValueError):
    """The training text is too small for the requested size of the vocabulary."""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a tokenizer on the texts. Its token 0 is <|endoftext|>. Raises TokenizerError if the texts are too small for `vocab_size`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise TokenizerError(
            f"the text yields {tokenizer.get_vocab_size()} tokens, not vocab_size={vocab_size}; collect more text, or lower vocab_size"
        )
    return tokenizer


def beginning(tokenizer: Tokenizer) -> Tokenizer:
    """Set the tokenizer to begin every prompt with <|endoftext|>, as training sequences of pictures do, and return it."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, end)])
    return tokenizer
