"""Where samples go: into a file of the run, from this process or from workers, which send theirs with Locust's own reports."""

from collections.abc import Mapping
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
    """One a process. `in_flight` counts requests on their way, those of workers as of their last report."""

    def __init__(self) -> None:
        self._pending: list[Sample] = []
        self._mine = 0
        self._workers: dict[str, int] = {}

    @property
    def in_flight(self) -> int:
        return self._mine + sum(self._workers.values())

    def sent(self) -> None:
        self._mine += 1

    def ended(self, sample: Sample) -> None:
        self._mine -= 1
        self._pending.append(sample)

    def attach(self, environment: Environment, out: Path | None) -> None:
        """Keep the file of a run in the folder `out`, or as a worker report to the process that does."""
        if isinstance(environment.runner, WorkerRunner) or out is None:
            environment.events.report_to_master.add_listener(self._report)
            return
        samples.write_header(out)
        environment.events.worker_report.add_listener(self._reported)
        environment.events.quitting.add_listener(lambda **_: self._flush(out))
        gevent.spawn(self._keep_flushing, out)

    def _keep_flushing(self, out: Path) -> None:
        while True:
            gevent.sleep(_FLUSH_S)
            self._flush(out)

    def _flush(self, out: Path) -> None:
        pending, self._pending = self._pending, []
        samples.append(out, pending)

    def _report(self, client_id: str, data: dict[str, Any]) -> None:
        pending, self._pending = self._pending, []
        data[_FIELD] = {"in_flight": self._mine, "samples": pending}

    def _reported(self, client_id: str, data: Mapping[str, Any]) -> None:
        told = data[_FIELD]
        self._workers[client_id] = told["in_flight"]
        self._pending += [Sample(*sample) for sample in told["samples"]]


RECORDER = Recorder()
