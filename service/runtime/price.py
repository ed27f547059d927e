"""The time of a call of the step graph, as a fixed cost and a cost per token."""

import math

_MEMORY = 0.95  # factor by which the weight of earlier calls decreases at each call
_CALL_TOKENS = 16.0  # fixed cost of a call, in tokens, assumed until calls of several sizes were measured
_WEIGHT = 0.05  # weight of the assumed ratio of fixed cost to cost per token, relative to one measured call
_SPREAD = 0.25  # the sizes of recent calls must vary by at least this fraction, or the fixed cost cannot be told from the cost per token
_OUTLIER = 4.0  # a call counts with at most this many times its expected time, because a slower call was delayed by other work


class Price:
    """The expected time `call_s + tokens * token_s` of a call. Both costs are fitted by least squares to recent calls, and are 0 at first.

    While all calls have about the same size, `call_s` cannot be told from `token_s`, so their ratio is kept.
    """

    def __init__(self) -> None:
        self.call_s = self.token_s = 0.0
        self._calls = self._tokens = self._seconds = self._squares = self._products = 0.0  # weighted sums over calls, for the fit
        self._ratio = _CALL_TOKENS

    def of(self, tokens: float) -> float:
        """Return the expected seconds of a call with `tokens` tokens."""
        return self.call_s + tokens * self.token_s

    @property
    def call_tokens(self) -> float:
        """Return the fixed cost of one call, as the number of tokens that cost the same time."""
        return self.call_s / self.token_s if self.token_s else 0.0

    def paid(self, tokens: int, seconds: float) -> None:
        """Update the costs with a measured call of `tokens` tokens that took `seconds`."""
        if self.token_s:
            seconds = min(seconds, _OUTLIER * self.of(tokens))
        self._calls = _MEMORY * self._calls + 1
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self._squares = _MEMORY * self._squares + tokens * tokens
        self._products = _MEMORY * self._products + tokens * seconds
        mean = self._tokens / self._calls
        spread = math.sqrt(max(self._squares / self._calls - mean * mean, 0.0))
        # the new costs minimise sum (call_s + tokens * token_s - seconds)**2 + weight * (call_s - ratio * token_s)**2
        weight = _WEIGHT * (1 if spread > _SPREAD * mean else 100)
        a, b, d = self._calls + weight, self._tokens - weight * self._ratio, self._squares + weight * self._ratio**2
        determinant = a * d - b * b
        call_s = (d * self._seconds - b * self._products) / determinant
        token_s = (a * self._products - b * self._seconds) / determinant
        if call_s < 0:
            call_s, token_s = 0.0, self._products / self._squares
        elif token_s <= 0:
            token_s = self._seconds / (self._tokens + self._ratio * self._calls)
            call_s = self._ratio * token_s
        self.call_s, self.token_s = call_s, token_s
        if spread > _SPREAD * mean:
            self._ratio = min(max(self.call_tokens, 1.0), 256.0)
