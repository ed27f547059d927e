"""The price of a token along one long sequence: of ours to its end, and beside its beginning of the twin."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from loadtest.generation import steps
from loadtest.generation.plan import Plan
from loadtest.generation.steps import Stretch
from loadtest.generation.twin import Twin

TWIN_TOKENS = 8_192
STRETCH, TWIN_STRETCH = 1_000, 256  # tokens


class LongSequences:
    """The stretches of both. They take turns, so that a slow minute of the machine hits both."""

    def __init__(self, plan: Plan, twin: Path | None) -> None:
        self.ours: list[Stretch] = []
        self.twins: list[Stretch] = []
        self._plan = plan
        # It keeps its caches to the end: what the process holds is changed by our sequence alone.
        length = min(plan.tokens, TWIN_TOKENS)
        self._twin = Twin(twin, rows=1, capacity=length, threads=plan.threads) if twin else None
        self.twin_token_bytes = self._twin.cache_bytes / length if self._twin else 0.0

    def run(self, show: Callable[[str], None]) -> None:
        growing: Iterator[Stretch] = self._twin.sequence(TWIN_STRETCH) if self._twin else iter(())
        for stretch in steps.long_sequence(self._plan.bundle, self._plan.tokens, self._plan.threads, STRETCH):
            show(f"one sequence: token {stretch.first + stretch.tokens:,} of {self._plan.tokens:,}")
            self.ours.append(stretch)
            self.twins += islice(growing, STRETCH // TWIN_STRETCH + 1)
