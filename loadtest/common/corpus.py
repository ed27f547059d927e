"""Realistic texts, seeded: words by Zipf's law, lengths by kind of text.

Lengths are log-normal, as those of queries, passages and documents are: many short ones, and a long tail. Word frequencies follow 1 / rank.
The words are those of `texts.py`, a token each for BERT's tokenizer. Long enough texts are never alike, short ones hardly ever.
"""

import itertools
import keyword
import random
from dataclasses import dataclass
from math import log

from loadtest.common.texts import WORDS

_CUMULATIVE = tuple(itertools.accumulate(1 / rank for rank in range(1, len(WORDS) + 1)))
_SENTENCE_WORDS = (5, 22)
_NAMES = tuple(word for word in WORDS if not keyword.iskeyword(word))


@dataclass(frozen=True)
class Length:
    """Log-normal: half of the texts have fewer than `median` words; cut to fewest..most."""

    median: float
    sigma: float
    fewest: int
    most: int

    def draw(self, draw: random.Random) -> int:
        return min(max(round(draw.lognormvariate(log(self.median), self.sigma)), self.fewest), self.most)


QUERY = Length(median=8, sigma=0.5, fewest=3, most=40)
PASSAGE = Length(median=80, sigma=0.6, fewest=10, most=400)
DOCUMENT = Length(median=3000, sigma=0.5, fewest=1000, most=12_000)
MESSAGE = Length(median=25, sigma=0.8, fewest=2, most=300)


def words(draw: random.Random, n_words: int) -> str:
    """So many words and nothing else."""
    return " ".join(draw.choices(WORDS, cum_weights=_CUMULATIVE, k=n_words))


def prose(draw: random.Random, n_words: int) -> str:
    """So many words in sentences."""
    drawn, sentences = draw.choices(WORDS, cum_weights=_CUMULATIVE, k=n_words), []
    while drawn:
        size = draw.randint(*_SENTENCE_WORDS)
        sentence, drawn = drawn[:size], drawn[size:]
        sentences.append(" ".join(sentence).capitalize() + ".")
    return " ".join(sentences)


def code(draw: random.Random) -> str:
    """The beginning of a Python function, for decoders of code: a signature, a docstring and sometimes lines of a body."""
    name, *arguments = draw.sample(_NAMES, draw.randint(2, 4))
    lines = [f"def {name}({', '.join(arguments)}):", f'    """{prose(draw, QUERY.draw(draw))}"""']
    lines += [
        f"    {draw.choice(_NAMES)} = {draw.choice(arguments)} {draw.choice('+-*')} {draw.randint(0, 99)}"
        for _ in range(draw.choice((0, 0, 1, 3, 8)))
    ]
    return "\n".join(lines) + "\n"
