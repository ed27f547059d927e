"""Measures tokens per second by batch size, up to the largest batch whose states or KV caches fit into a given memory.

A sequence of our decoder keeps its states twice (a step reads one set and writes the other). A sequence of the twin (the same decoder with
softmax attention) keeps keys and values of all its tokens. Weights and a step's intermediate values are not counted. A step of our decoder
costs the same at every position, so a few steps are timed. A step of the twin costs more at later positions, so it is timed at a few
positions, and the cost of a whole sequence is computed from these by the trapezoidal rule.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from export import contract
from loadtest.in_process.steps import median_s, open_steps, stepping
from loadtest.in_process.twin import Twin

SAMPLES = 5  # number of positions at which a step of the softmax twin is timed


def row_bytes(bundle: Path) -> int:
    """Return the bytes that the states of one sequence take in the bundle's decoder, which keeps them twice."""
    decoder = contract.read_manifest(bundle).decoder
    assert decoder is not None
    return 2 * decoder.state_bytes


def twin_row_bytes(graph: Path, steps: int) -> int:
    """Return the bytes of the twin's KV cache for one sequence after `steps` tokens."""
    return Twin(graph, rows=1, capacity=steps, threads=1).cache_bytes


def ladder(bytes_a_row: int, memory_bytes: int) -> list[int]:
    """Return the batch sizes to measure: 1, 2, 4, .. and the largest that fits into `memory_bytes`. Raises ValueError if not even one row
    fits."""
    most = memory_bytes // bytes_a_row
    if not most:
        raise ValueError(f"a sequence takes {bytes_a_row} bytes, more than the memory of {memory_bytes}")
    return sorted({2**power for power in range(most.bit_length())} | {most})


def ours(bundle: Path, batches: Sequence[int], seconds: float, threads: int) -> dict[int, float]:
    """Return the tokens per second of the bundle's decoder for each batch size."""
    session = open_steps(bundle, threads)
    return {rows: rows / median_s(stepping(session, rows, warm_steps=1), seconds) for rows in batches}


def twins(graph: Path, batches: Sequence[int], steps: int, seconds: float, threads: int) -> dict[int, float]:
    """Return the tokens per second of the softmax twin for each batch size, averaged over sequences of `steps` tokens."""
    return {rows: rows / _mean_step_s(graph, rows, steps, seconds, threads) for rows in batches}


def _mean_step_s(graph: Path, rows: int, steps: int, seconds: float, threads: int) -> float:
    twin = Twin(graph, rows=rows, capacity=steps, threads=threads)
    positions = sampled(steps)
    return mean_over(positions, [twin.step_s(position, seconds / len(positions)) for position in positions])


def sampled(steps: int) -> list[int]:
    """Return SAMPLES evenly spaced positions from the first (0) to the last (`steps` - 1)."""
    return sorted({round(position) for position in np.linspace(0, steps - 1, SAMPLES)})


def mean_over(positions: Sequence[int], costs_s: Sequence[float]) -> float:
    """Return the mean cost of a step over all positions, by the trapezoidal rule between the given positions."""
    if len(positions) == 1:
        return costs_s[0]
    return float(np.trapezoid(costs_s, positions)) / (positions[-1] - positions[0])
