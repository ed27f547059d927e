"""The time of a step along one long sequence, of a decoder with a constant state and of its softmax twin."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from loadtest.in_process import steps
from loadtest.in_process.steps import Stretch
from loadtest.in_process.twin import Twin

TWIN_TOKENS = 8_192
STRETCH, TWIN_STRETCH = 1_000, 256  # tokens


class LongSequences:
    """The stretches of both. They take turns, so that a slow minute of the machine slows both down."""

    def __init__(self, bundle: Path, tokens: int, threads: int, twin: Path | None) -> None:
        self.ours: list[Stretch] = []
        self.twins: list[Stretch] = []
        self._bundle, self._tokens, self._threads = bundle, tokens, threads
        # The twin keeps its caches to the end: what the process holds is changed by our sequence alone.
        length = min(tokens, TWIN_TOKENS)
        self._twin = Twin(twin, rows=1, capacity=length, threads=threads) if twin else None
        self.twin_token_bytes = self._twin.cache_bytes / length if self._twin else 0.0

    def run(self, show: Callable[[str], None]) -> None:
        growing: Iterator[Stretch] = self._twin.sequence(TWIN_STRETCH) if self._twin else iter(())
        for stretch in steps.long_sequence(self._bundle, self._tokens, self._threads, STRETCH):
            show(f"one sequence: token {stretch.first + stretch.tokens:,} of {self._tokens:,}")
            self.ours.append(stretch)
            self.twins += islice(growing, STRETCH // TWIN_STRETCH + 1)
