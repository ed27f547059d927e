"""What a call of the step graph takes: so much for the call, and so much for each token in it."""

import math

_MEMORY = 0.95  # weight of the past, at each call
_CALL_TOKENS = 16.0  # tokens that a call costs as much as, until calls of several sizes have told
_WEIGHT = 0.05  # of that ratio beside a call's time
_SPREAD = 0.25  # of the sizes, as a share of their mean: with less, they do not tell the two prices apart
_OUTLIER = 4.0  # times the expected time: what is beyond it is not the call's own


class Price:
    """`call_s + tokens * token_s`, fitted by least squares to the last calls, the older the less. Both are 0 before the first call.

    Calls of one size alone do not say which part of their time is the call's: then the ratio of the two is taken to be what it was.
    """

    def __init__(self) -> None:
        self.call_s = self.token_s = 0.0
        self._calls = self._tokens = self._seconds = self._squares = self._products = 0.0  # weighted sums
        self._ratio = _CALL_TOKENS

    def of(self, tokens: float) -> float:
        """Seconds."""
        return self.call_s + tokens * self.token_s

    @property
    def call_tokens(self) -> float:
        """What a call costs beside its tokens, in tokens."""
        return self.call_s / self.token_s if self.token_s else 0.0

    def paid(self, tokens: int, seconds: float) -> None:
        """A call with so many tokens took so long."""
        if self.token_s:
            seconds = min(seconds, _OUTLIER * self.of(tokens))
        self._calls = _MEMORY * self._calls + 1
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self._squares = _MEMORY * self._squares + tokens * tokens
        self._products = _MEMORY * self._products + tokens * seconds
        mean = self._tokens / self._calls
        spread = math.sqrt(max(self._squares / self._calls - mean * mean, 0.0))
        # sum (call_s + tokens * token_s - seconds)**2 + weight * (call_s - ratio * token_s)**2 is least
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
