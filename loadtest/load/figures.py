"""Computes figures from samples, by stage and kind. Latencies are those of good answers; a refusal (429) is not a failure."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from loadtest.load.plan import DRAIN
from loadtest.load.samples import Sample, StageStart

ALL = "all"  # the name for all kinds of clients together, without the hostile one
# Figures are not valid if the p99 of the load generator's own delay exceeds both LATE_MS and LATE_SHARE times the p99 of the latency.
LATE_MS, LATE_SHARE = 50.0, 0.1
_SETTLE_S = 1.0  # Locust starts or stops users within about a second after a stage begins


class Figures(BaseModel):
    """Figures of the requests that were due in a stage. A figure is None if no request has a value for it."""

    model_config = ConfigDict(frozen=True)

    arrivals: int
    offered_per_s: float
    answered_per_s: float  # good answers per second; those whose last byte arrived within the stage
    tokens_per_s: float  # tokens per second in the answers that `answered_per_s` counts
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    refused_share: float
    retry_after_share: float | None = None  # share of the refusals (429) that had the header Retry-After
    error_share: float  # share of requests with neither a good answer nor a refusal
    late_p99_ms: float | None = None  # the load generator's own delay; if it is large, the figures do not describe the service
    first_p50_ms: float | None = None
    first_p99_ms: float | None = None
    between_p50_ms: float | None = None
    between_p99_ms: float | None = None
    longest_p99_ms: float | None = None
    stream_tokens_per_s: float | None = None  # tokens per second of the median stream


NAMES = frozenset(Figures.model_fields)


class StageFigures(BaseModel):
    """The results of a stage. `cores`: process name -> CPU seconds per second; empty if the service runs on another machine."""

    name: str
    level: float
    begin_s: float
    end_s: float
    kinds: Mapping[str, Figures]
    cores: Mapping[str, float] = {}

    @property
    def all(self) -> Figures:
        return self.kinds[ALL]

    @property
    def late_ms(self) -> float | None:
        """The load generator's own delay (p99) if it is so large that it may have caused latencies and refusals, else None."""
        late = self.all.late_p99_ms or 0.0
        return late if late > max(LATE_MS, LATE_SHARE * (self.all.p99_ms or 0.0)) else None


def by_stage(samples: Sequence[Sample], begun: Sequence[StageStart]) -> list[StageFigures]:
    """Return the figures of every stage except the last, in which no requests are sent. The first second of a stage is not counted."""
    made = []
    for stage, following in pairwise(begun):
        begin_s, end_s = stage.begin_s + min(_SETTLE_S, (following.begin_s - stage.begin_s) / 2), following.begin_s
        due = [sample for sample in samples if begin_s <= sample.due_s < end_s]
        done = [sample for sample in samples if begin_s <= sample.done_s < end_s and sample.good]
        kinds = {
            kind: figures_of([s for s in due if s.kind == kind], [s for s in done if s.kind == kind], end_s - begin_s)
            for kind in sorted({sample.kind for sample in due})
        }
        customers = ([s for s in due if s.kind != "hostile"], [s for s in done if s.kind != "hostile"])
        kinds[ALL] = figures_of(*customers, end_s - begin_s)
        made.append(StageFigures(name=stage.name, level=stage.level, begin_s=begin_s, end_s=end_s, kinds=kinds))
    assert begun[-1].name == DRAIN.name
    return made


def figures_of(due: Sequence[Sample], done: Sequence[Sample], seconds: float) -> Figures:
    """Return the figures of the requests `due` within a period of `seconds`, and of the good answers `done` within it."""
    refused = [sample for sample in due if sample.status == 429]
    # A hostile client's good answer is the expected error.
    failed = [sample for sample in due if sample.status != 429 and (sample.problem if sample.kind == "hostile" else not sample.good)]
    good = [sample for sample in due if sample.good]
    values: dict[str, Any] = {
        "arrivals": len(due),
        "offered_per_s": len(due) / seconds,
        "answered_per_s": len(done) / seconds,
        "tokens_per_s": sum(sample.tokens for sample in done) / seconds,
        "refused_share": len(refused) / max(len(due), 1),
        "retry_after_share": sum(sample.retry_after for sample in refused) / len(refused) if refused else None,
        "error_share": len(failed) / max(len(due), 1),
        "late_p99_ms": percentile([sample.late_ms for sample in due], 99),
        "max_ms": max((sample.ms for sample in good), default=None),
    }
    values |= {f"p{n}_ms": percentile([sample.ms for sample in good], n) for n in (50, 95, 99)}
    for name in ("first", "between"):
        found = [value for sample in good if (value := getattr(sample, f"{name}_ms")) is not None]
        values |= {f"{name}_p{n}_ms": percentile(found, n) for n in (50, 99)}
    values["longest_p99_ms"] = percentile([sample.longest_ms for sample in good if sample.longest_ms is not None], 99)
    between = [sample.between_ms for sample in good if sample.between_ms]
    values["stream_tokens_per_s"] = 1000 / float(np.median(between)) if between else None
    return Figures(**values)


def percentile(values: Sequence[float], n: float) -> float | None:
    return float(np.percentile(values, n)) if values else None
