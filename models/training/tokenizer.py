"""Byte-level byte-pair encoding for Python: every text has tokens, and no byte is lost.

Text is first split into pieces that no token crosses: line ends; the indentation of a line as a whole (one token for 8 or 12 spaces);
names with their underscores and the space before them; single digits; runs of other signs. The cuts are where people stop typing, so
that a prompt that ends in `:`, in a newline or in the indentation gets the same tokens as the text it was cut from.
Sennrich et al. 2016, arXiv:1508.07909; bytes as the alphabet: Radford et al. 2019 (GPT-2).
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from service.errors import AttnserveError

END_OF_TEXT = "<|endoftext|>"
PIECES = "|".join(
    (
        r"[^\S\n]*\n+",  # line ends, with blanks before them
        r"(?<=\n)[^\S\n]+",  # indentation
        r" ?[\p{L}\p{M}_]+",  # names and words
        r" ?\p{N}",  # digits, one by one
        r" ?[^\s\p{L}\p{M}\p{N}_]+",  # operators, brackets, quotes
        r"[^\S\n]+(?!\S)",
        r"[^\S\n]+",
    )
)


class TokenizerError(AttnserveError, ValueError):
    """The text is too small for the requested vocabulary."""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Learn merges from the texts. <|endoftext|> is token 0. Raises TokenizerError when the text is too small for `vocab_size`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise TokenizerError(
            f"the text yields {tokenizer.get_vocab_size()} tokens, not vocab_size={vocab_size}; collect more, or ask for fewer"
        )
    return tokenizer


def beginning(tokenizer: Tokenizer) -> Tokenizer:
    """The same, with <|endoftext|> before every prompt: for a model whose every sequence began there."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, end)])
    return tokenizer
