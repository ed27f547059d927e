"""Compares a constant time of a step with one that grows: the position from which the constant one is lower."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.in_process.steps import Stretch


@dataclass(frozen=True)
class Line:
    """s(t) = at_0_s + s_per_position t."""

    at_0_s: float
    s_per_position: float

    def at(self, position: float) -> float:
        return self.at_0_s + self.s_per_position * position


def fitted(stretches: Sequence[Stretch]) -> Line:
    """Least squares through the middles of two stretches at least."""
    slope, at_0 = np.polyfit([stretch.middle for stretch in stretches], [stretch.s_per_token for stretch in stretches], 1)
    return Line(float(at_0), float(slope))


def crossover(flat: Sequence[Stretch], growing: Sequence[Stretch]) -> float | None:
    """The position from which every token of `growing` takes longer than the median of `flat`, or None.

    If the growing one is still faster at the end of its measurement, its fitted line is extended.
    """
    price_s = statistics.median(stretch.s_per_token for stretch in flat)
    cheaper = [stretch for stretch in growing if stretch.s_per_token <= price_s]
    if not cheaper:
        return 0
    last = cheaper[-1]
    if last is not growing[-1]:
        return last.first + last.tokens
    line = fitted(growing)
    if line.s_per_position <= 0:
        return None
    return max(last.first + last.tokens, (price_s - line.at_0_s) / line.s_per_position)
