"""Guesses the next tokens of a run from its own text, so that one call of the step graph can check several tokens at once (speculative
decoding by n-gram lookup).

A guess is the text that followed the last occurrence of the run's newest `_GRAM` tokens. The graph computes the logits after each guessed
token, and the sampler draws from them as it draws without guesses; the first draw that differs from its guess ends the call's use. So
guesses change the time of a run, never its tokens. Saxena 2023, "Prompt lookup decoding"; Leviathan et al. 2023, arXiv:2211.17192.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from service.runtime.moving_average import averaged

WIDTH: Final = (
    4  # most tokens of a run in one step; on a CPU, a step of one run takes hardly longer with 4 tokens than with 1 (docs/decisions.md)
)
_GRAM = 3  # tokens that must occur again
MOST_PLACES: Final = 4096  # tokens back to which the lookup reaches
_KEPT = 0.8  # weight of earlier guesses in the average of right tokens
_MARGIN = 1.1  # guesses must be worth so many times what they cost
_FORGET = 0.999  # factor by which the cost of the other kind of steps decreases at each decision, so that it is measured again


class Guesses:
    """The text of one run, with the places of its n-grams."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """`tokens`: what the run has read and drawn so far."""
        self._tokens: list[int] = []
        self._places: OrderedDict[tuple[int, ...], int] = OrderedDict()  # n-gram -> index of the token after its last occurrence
        self._expected: list[int] = []  # the open guess's tokens that were not drawn yet
        self._n_right = 0
        self.right = 1.0  # moving average of a guess's right tokens, also of guesses that no step has used
        for token_id in tokens[-MOST_PLACES:]:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Append a drawn token."""
        if self._expected:
            if token_id == self._expected.pop(0):
                self._n_right += 1
            else:
                self._expected.clear()
            if not self._expected:
                self.right = _KEPT * self.right + (1 - _KEPT) * self._n_right
        if len(self._tokens) >= _GRAM:
            gram = tuple(self._tokens[-_GRAM:])
            self._places[gram] = len(self._tokens)
            self._places.move_to_end(gram)
            if len(self._places) > MOST_PLACES:
                self._places.popitem(last=False)
        self._tokens.append(token_id)

    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens that may come next, or none."""
        place = self._places.get(tuple(self._tokens[-_GRAM:]))
        guess = [] if place is None else self._tokens[place : place + most]
        if not self._expected:
            self._expected, self._n_right = guess.copy(), 0
        return guess


class Worth:
    """Decides whether guesses pay, by the measured time of steps with and without them. Steps of about as many rows are alike."""

    def __init__(self) -> None:
        self._plain_s: dict[int, float] = {}  # bit length of the number of rows -> average seconds of a step
        self._guessing_s: dict[int, float] = {}

    def pays(self, rows: int, right: float) -> bool:
        """Return whether to guess in a step of `rows` rows, if `right` guessed tokens of all rows together will probably be right."""
        size = rows.bit_length()
        if size not in self._plain_s or size not in self._guessing_s:
            return size in self._plain_s
        pays = (rows + right) * self._plain_s[size] > _MARGIN * rows * self._guessing_s[size]
        (self._plain_s if pays else self._guessing_s)[size] *= _FORGET
        return pays

    def took(self, rows: int, seconds: float, *, guessing: bool) -> None:
        """Note the time of a step."""
        averages = self._guessing_s if guessing else self._plain_s
        size = rows.bit_length()
        averages[size] = averaged(averages.get(size, 0.0), seconds)
