"""What streams measure besides the time of the whole request, in a table of its own: as rows among Locust's requests they would count as
requests, in its totals and rates.

The table is printed at the end, and with `--csv PREFIX` written to PREFIX_measurements.csv. Workers send theirs to the master.
"""

import csv
from pathlib import Path
from typing import Any

from locust import events
from locust.env import Environment
from locust.stats import RequestStats, StatsEntry, console_logger

COLUMNS = ("kind", "measurement", "count", "mean", "min", "median", "p95", "p99", "max")
_found = RequestStats(use_response_times_cache=False)


def note(kind: str, measurement: str, value: float) -> None:
    """Add a measured value of a request of this kind, such as ("chat", "first token, ms", 31.5)."""
    _found.log_request(kind, measurement, value, 0)  # type: ignore[arg-type]  # Locust's own times are floats too


def rows() -> list[tuple[str | float, ...]]:
    """Return the table, by COLUMNS."""
    return [
        (
            *(entry.method, entry.name, entry.num_requests, round(entry.avg_response_time, 2), entry.min_response_time or 0.0),
            *(entry.get_response_time_percentile(share) for share in (0.5, 0.95, 0.99)),
            entry.max_response_time,
        )
        for _, entry in sorted(_found.entries.items(), key=lambda found: (found[1].method, found[1].name))
        if entry.num_requests
    ]


def begin(environment: Environment, **_: object) -> None:
    environment.events.test_start.add_listener(lambda **_: _found.reset_all())
    environment.events.report_to_master.add_listener(_report)
    environment.events.worker_report.add_listener(_reported)
    environment.events.quit.add_listener(lambda **_: _write(environment))


def _report(client_id: str, data: dict[str, Any]) -> None:
    data["measurements"] = [entry.get_stripped_report() for entry in _found.entries.values() if entry.num_requests]


def _reported(client_id: str, data: dict[str, Any]) -> None:
    for each in data.get("measurements", ()):
        entry = StatsEntry.unserialize(each, _found)
        _found.get(entry.name, entry.method).extend(entry)


def _write(environment: Environment) -> None:
    options, table = environment.parsed_options, rows()
    if not table or options is None or options.worker:
        return
    for row in (COLUMNS, *table):
        console_logger.info("%-12s %-22s" + " %9s" * 7, *row)
    if options.csv_prefix:
        with Path(f"{options.csv_prefix}_measurements.csv").open("w", newline="") as file:
            csv.writer(file).writerows((COLUMNS, *table))


events.init.add_listener(begin)
