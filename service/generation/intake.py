"""The prompts that wait to be fed, by which a request is refused whose prompt cannot be fed before its deadline."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from service.errors import QueueTooLong
from service.generation.request import GenerationRequest

_LEAST_RETRY_S = 1.0


class PromptWork:
    """The prompts of one engine that are not fed yet, also those that are still being tokenised. Used on the event loop."""

    def __init__(self, token_s: Callable[[], float], unfed: Callable[[], Iterable[tuple[GenerationRequest, int]]]) -> None:
        """`token_s` returns the seconds that a token of a prompt takes. `unfed` returns each request that waits or has a slot, with the
        number of tokens that are left of its prompt.
        """
        self._token_s = token_s
        self._unfed = unfed
        self._expected: dict[int, tuple[str, float]] = {}  # client and estimated tokens of each prompt that is being tokenised
        self._numbers = itertools.count()

    @contextmanager
    def expecting(self, client: str, tokens: float, deadline: float) -> Iterator[None]:
        """Within the block, count a prompt of about `tokens` tokens as not fed yet. Raises what `check` raises."""
        self.check(client, tokens, deadline)
        number = next(self._numbers)
        self._expected[number] = client, tokens
        try:
            yield
        finally:
            del self._expected[number]

    def check(self, client: str, tokens: float, deadline: float) -> None:
        """Raise QueueTooLong if the prompts before a new one of this size take until after its deadline. An idle engine admits any."""
        before_s = self._before(client, tokens) * self._token_s()
        left_s = max(deadline - time.monotonic(), 0.0)
        if before_s > left_s:
            raise QueueTooLong(
                f"Model is overloaded: the prompts before this one take about {before_s:.1f} s, and its deadline is in {left_s:.1f} s",
                retry_after_s=max(before_s - left_s, _LEAST_RETRY_S),
            )

    def _before(self, client: str, tokens: float) -> float:
        """Return how many tokens are fed before a new prompt's last piece, at least. Pieces alternate between the client that has been fed
        least and the shortest prompt (`prefill.py`), so it is the smaller number of both orders.
        """
        prompts = {id(request.prompt): (request.client, float(left)) for request, left in self._unfed()}
        waiting = [*prompts.values(), *self._expected.values()]
        by_client = Counter[str]()
        for each, left in waiting:
            by_client[each] += left  # type: ignore[assignment]  # typeshed allows integers only
        own = by_client.pop(client, 0)
        in_turns = own + sum(min(left, own + tokens) for left in by_client.values())
        return min(in_turns, sum(left for _, left in waiting if left <= tokens))
