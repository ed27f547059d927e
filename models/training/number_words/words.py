"""Draws pairs of a number and its words, in unlimited supply, for training and evaluation.

The words come from the package `num2words` (LGPL-2.1; it is called, not copied). A number of three digits or more is held out, in
every language, if its first three digits are 17 more than a multiple of 25: 117, 142, 167, ... 992; 1,170 to 1,179, ...;
117,000,000 to 117,999,999, ... For each number of digits these are 36 ranges, 4 % of the numbers. Held-out numbers are never used
for training, and the evaluation uses no others. All numbers below 100 are trained on, since each has words of its own.
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
ROUND = 0.25  # share of drawn numbers that are rounded, because numbers in real texts are often round


@dataclass(frozen=True)
class Example:
    """A number, and its words in `language`."""

    language: str
    number: int
    words: str


def in_words(number: int, language: str) -> str:
    """Return the words of a number in lower case, as the tokenizer lowercases all text."""
    return num2words(number, lang=language).lower()


def is_held_out(number: int) -> bool:
    """Return whether the number is held out from training."""
    return number >= 100 and int(str(number)[:3]) % HELD_OUT_EVERY == HELD_OUT_REST


def draw(random: Random, *, max_digits: int, languages: tuple[str, ...], evaluation: bool = False, min_digits: int = 1) -> Example:
    """Draw a held-out number if `evaluation` is True, otherwise a number that is not held out. Numbers of 3, 4, 5, .. digits are drawn
    equally often. Numbers of 1 or 2 digits are drawn less often, because there are few of them."""
    while True:
        n_digits = random.choices(range(min_digits, max_digits + 1), weights=[min(d, 3) for d in range(min_digits, max_digits + 1)])[0]
        number = random.randrange(10 ** (n_digits - 1) if n_digits > 1 else 0, 10**n_digits)
        if random.random() < ROUND:
            number = rounded(number, random)
        if is_held_out(number) == evaluation:
            language = random.choice(languages)
            return Example(language, number, in_words(number, language))


def rounded(number: int, random: Random) -> int:
    """Set each digit after the first to 0 with probability 1/2."""
    digits = str(number)
    return int(digits[0] + "".join(digit if random.random() < 0.5 else "0" for digit in digits[1:]))
