"""Writes the samples of a load test to a file. A sample has the measurements of one request. Locust's worker processes send their samples
to the master process, as a field of the reports that Locust sends anyway."""

import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import WorkerRunner

from loadtest.load import samples
from loadtest.load.samples import Sample

_FLUSH_S = 0.5
_FIELD = "attnserve_samples"


class Recorder:
    """Records the samples of one process. `in_flight` is the number of its requests in flight, plus those of its worker processes by their
    latest reports."""

    def __init__(self) -> None:
        self._pending: list[Sample] = []
        self._numbers = count()
        self._mine: dict[int, Sample] = {}
        self._workers: dict[str, list[Sample]] = {}

    @property
    def in_flight(self) -> int:
        return len(self._mine) + sum(map(len, self._workers.values()))

    def sent(self, kind: str, due_s: float, late_ms: float) -> int:
        """Register a request as in flight, and return its number, which `ended` takes."""
        number = next(self._numbers)
        self._mine[number] = Sample(kind, due_s, 0.0, late_ms, status=0, problem="no answer by the end of the run")
        return number

    def ended(self, number: int, sample: Sample) -> None:
        if self._mine.pop(number, None):  # unless `_close` has already recorded it as lost
            self._pending.append(sample)

    def attach(self, environment: Environment, out: Path | None) -> None:
        """Start to write samples to a file in the folder `out`. If this is a worker process, send them to the master instead."""
        if isinstance(environment.runner, WorkerRunner) or out is None:
            environment.events.report_to_master.add_listener(self._report)
            return
        samples.write_header(out)
        environment.events.worker_report.add_listener(self._reported)
        environment.events.quitting.add_listener(lambda **_: self._close(out))
        gevent.spawn(self._keep_flushing, out)

    def _keep_flushing(self, out: Path) -> None:
        while True:
            gevent.sleep(_FLUSH_S)
            self._flush(out)

    def _flush(self, out: Path) -> None:
        pending, self._pending = self._pending, []
        samples.append(out, pending)

    def _close(self, out: Path) -> None:
        """Record requests that are still in flight as failed, with status 0, so that a service that never answers is noticed. Then write
        all samples."""
        now = time.time()
        for lost in [*self._mine.values(), *(sent for told in self._workers.values() for sent in told)]:
            self._pending.append(lost._replace(ms=(now - lost.due_s) * 1000))
        self._mine.clear()
        self._workers.clear()
        self._flush(out)

    def _report(self, client_id: str, data: dict[str, Any]) -> None:
        pending, self._pending = self._pending, []
        data[_FIELD] = {"in_flight": list(self._mine.values()), "samples": pending}

    def _reported(self, client_id: str, data: Mapping[str, Any]) -> None:
        told = data[_FIELD]
        self._workers[client_id] = [Sample(*sent) for sent in told["in_flight"]]
        self._pending += [Sample(*sample) for sample in told["samples"]]


RECORDER = Recorder()
