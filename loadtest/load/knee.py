"""The knee of a ramp (the highest rate without overload), and the time a service takes to recover from overload."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loadtest.load.figures import StageFigures
from loadtest.load.samples import Sample

SLOWER = 5.0  # a step is overloaded if its p95 latency exceeds this multiple of the first step's p95
ANSWERED = 0.9  # a step is overloaded if it has fewer answers per second than this share of its arrivals per second
LOST = 0.01  # a step is overloaded if more than this share of its requests is refused or fails


class Knee(NamedTuple):
    """The last step of a ramp before the first overloaded one. `reached` is false if no step was overloaded: the true knee is at a higher
    rate.

    `late_ms` is set if the load generator itself was so late, in this step or in the overloaded one, that the service may not have been
    overloaded. Such a knee is not valid, and the ramp must be repeated.
    """

    stage: StageFigures
    reached: bool
    late_ms: float | None = None

    @property
    def rate(self) -> float:
        """Requests per second at the knee."""
        return self.stage.all.answered_per_s


def knee(steps: Sequence[StageFigures]) -> Knee | None:
    """Return the knee of a ramp, or None if its first step was overloaded and the load generator was not late in it. The steps are in the
    order of rising rates."""
    first = steps[0].all
    below: StageFigures | None = None
    for step in steps:
        figures = step.all
        lost = figures.refused_share + figures.error_share > LOST
        behind = figures.answered_per_s < ANSWERED * figures.offered_per_s
        slow = first.p95_ms is None or figures.p95_ms is None or figures.p95_ms > SLOWER * first.p95_ms
        if lost or behind or slow:
            late = max((each.late_ms for each in (below, step) if each and each.late_ms), default=None)
            return Knee(below or step, True, late) if below or late else None
        below = step
    return Knee(below, False, below.late_ms) if below else None


def recovery_s(samples: Sequence[Sample], since_s: float, until_s: float, normal_ms: float) -> float:
    """Return the seconds from `since_s`, the end of the overload, until the service is as before: in every later second no request is
    refused or fails, and the median of the requests due in it is at most `normal_ms`."""
    recovered = 0.0
    for second in range(int(until_s - since_s)):
        due = [sample for sample in samples if since_s + second <= sample.due_s < since_s + second + 1 and sample.kind != "hostile"]
        bad = any(not sample.good for sample in due) or (due and float(np.median([sample.ms for sample in due])) > normal_ms)
        recovered = second + 1.0 if bad else recovered
    return recovered
