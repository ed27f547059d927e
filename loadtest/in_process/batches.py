"""Tokens a second by batch, up to the largest batch whose states or caches fit a memory.

A sequence of ours keeps its states twice (a step reads one set and writes the other), one of the twin keeps keys and values of all its
tokens. Weights and intermediate values of a step are not counted. Our step costs the same at every position, so some steps are timed; the
twin's grows with the position, so it is timed at a few and integrated over the sequence.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from export import contract
from loadtest.in_process.steps import median_s, open_steps, stepping
from loadtest.in_process.twin import Twin

SAMPLES = 5  # positions at which the twin is timed


def row_bytes(bundle: Path) -> int:
    """Bytes of state of a sequence of the bundle."""
    decoder = contract.read_manifest(bundle).decoder
    assert decoder is not None
    return 2 * decoder.state_bytes


def twin_row_bytes(graph: Path, steps: int) -> int:
    """Bytes of cache of a sequence of the twin after `steps` tokens."""
    return Twin(graph, rows=1, capacity=steps, threads=1).cache_bytes


def ladder(bytes_a_row: int, memory_bytes: int) -> list[int]:
    """1, 2, 4, .. and the largest batch that fits. Raises ValueError when not even one row does."""
    most = memory_bytes // bytes_a_row
    if not most:
        raise ValueError(f"a sequence takes {bytes_a_row} bytes, and the memory has {memory_bytes}: nothing fits")
    return sorted({2**power for power in range(most.bit_length())} | {most})


def ours(bundle: Path, batches: Sequence[int], seconds: float, threads: int) -> dict[int, float]:
    """Tokens a second of each batch."""
    session = open_steps(bundle, threads)
    return {rows: rows / median_s(stepping(session, rows, warm_steps=1), seconds) for rows in batches}


def twins(graph: Path, batches: Sequence[int], steps: int, seconds: float, threads: int) -> dict[int, float]:
    """Tokens a second of each batch, averaged over sequences of `steps` tokens."""
    return {rows: rows / _mean_step_s(graph, rows, steps, seconds, threads) for rows in batches}


def _mean_step_s(graph: Path, rows: int, steps: int, seconds: float, threads: int) -> float:
    twin = Twin(graph, rows=rows, capacity=steps, threads=threads)
    positions = sampled(steps)
    return mean_over(positions, [twin.step_s(position, seconds / len(positions)) for position in positions])


def sampled(steps: int) -> list[int]:
    """Positions from the first to the last, evenly spread."""
    return sorted({round(position) for position in np.linspace(0, steps - 1, SAMPLES)})


def mean_over(positions: Sequence[int], costs_s: Sequence[float]) -> float:
    """The mean cost of a step over all positions, taken to be straight between those given (trapezoidal rule)."""
    if len(positions) == 1:
        return costs_s[0]
    return float(np.trapezoid(costs_s, positions)) / (positions[-1] - positions[0])
