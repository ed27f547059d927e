"""The time of a step along one long sequence, of a decoder with a constant state and of its softmax twin."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from loadtest.in_process import steps
from loadtest.in_process.steps import Stretch
from loadtest.in_process.twin import Twin

TWIN_TOKENS = 8_192
STRETCH, TWIN_STRETCH = 1_000, 256  # tokens


def long_sequences(bundle: Path, tokens: int, threads: int, twin: Path | None) -> Iterator[tuple[Stretch, list[Stretch]]]:
    """Each stretch of the bundle's sequence of `tokens`, with the stretches of the twin (a graph) that are measured beside it, up to
    TWIN_TOKENS. They take turns, so that a slow minute of the machine slows both down."""
    # Kept to the end, so that what the process holds is changed by the bundle's sequence alone.
    softmax = Twin(twin, rows=1, capacity=min(tokens, TWIN_TOKENS), threads=threads) if twin else None
    growing = softmax.sequence(TWIN_STRETCH) if softmax else iter(())
    for stretch in steps.long_sequence(bundle, tokens, threads, STRETCH):
        yield stretch, list(islice(growing, STRETCH // TWIN_STRETCH + 1))
