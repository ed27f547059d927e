"""Pairs of a number and its words, an unlimited supply for training and evaluation.

The words come from the package `num2words` (LGPL-2.1; it is called, not copied). A number of three digits or more is held out, in every
language, if its first three digits are 17 more than a multiple of 25: 117, 142, 167, ... 992; 1,170 to 1,179, 1,420 to 1,429, ...;
117,000,000 to 117,999,999, ... These are 36 ranges of every magnitude, 4 % of its numbers. They are never trained on, and only they are
evaluated on. Numbers below 100 are the words themselves: all of them are trained on.
"""

from dataclasses import dataclass
from random import Random

from num2words import num2words

LANGUAGES = {
    "en": "English",
    "de": "German",
    "fr": "French",
    "es": "Spanish",
    "it": "Italian",
    "nl": "Dutch",
    "pt": "Portuguese",
    "sv": "Swedish",
}
MAX_DIGITS = 9
HELD_OUT_EVERY, HELD_OUT_REST = 25, 17
ROUND = 0.25  # share of numbers in which digits were made 0: few of those that people write are as crooked as those that chance gives


@dataclass(frozen=True)
class Example:
    """`number` in the words of `language`."""

    language: str
    number: int
    words: str


def in_words(number: int, language: str) -> str:
    """The words of a number, in lower case, as the tokenizer makes all text."""
    return num2words(number, lang=language).lower()


def is_held_out(number: int) -> bool:
    """Whether the number is in a range that is not trained on."""
    return number >= 100 and int(str(number)[:3]) % HELD_OUT_EVERY == HELD_OUT_REST


def draw(random: Random, *, max_digits: int, languages: tuple[str, ...], evaluation: bool = False, min_digits: int = 1) -> Example:
    """Of the numbers held out, or of all others. Every magnitude is as likely as the next, but for those of one and two digits, of which
    there are few."""
    while True:
        n_digits = random.choices(range(min_digits, max_digits + 1), weights=[min(d, 3) for d in range(min_digits, max_digits + 1)])[0]
        number = random.randrange(10 ** (n_digits - 1) if n_digits > 1 else 0, 10**n_digits)
        if random.random() < ROUND:
            number = rounded(number, random)
        if is_held_out(number) == evaluation:
            language = random.choice(languages)
            return Example(language, number, in_words(number, language))


def rounded(number: int, random: Random) -> int:
    """Half of the digits but the first become 0."""
    digits = str(number)
    return int(digits[0] + "".join(digit if random.random() < 0.5 else "0" for digit in digits[1:]))
