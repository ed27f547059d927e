"""The log of a service whose processes write to one file."""

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.telemetry import logs
from service.telemetry.logs import Follower, to_file

LINES, LINE_BYTES = 2500, 8192  # of each writer: 20 MiB, more than the file may have
WRITER = f"""
import logging, sys
from pathlib import Path
from service.telemetry.logs import to_file
to_file(Path(sys.argv[1]), "info")
for number in range({LINES}):
    logging.getLogger("attnserve").info("x" * {LINE_BYTES}, extra={{"writer": int(sys.argv[2]), "number": number}})
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A file to which the logger of the service writes during the test."""
    logger = logging.getLogger("attnserve")
    before = logger.handlers, logger.level, logger.propagate
    to_file(tmp_path / "log", "info")
    yield tmp_path / "log"
    logger.handlers[0].close()
    logger.handlers, logger.level, logger.propagate = before


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("writers", [1, 3])
def test_no_record_is_lost_when_there_are_more_than_the_file_may_have(tmp_path: Path, writers: int) -> None:
    follower = Follower(tmp_path / "log", stream := io.StringIO())
    processes = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "log"), str(writer)]) for writer in range(writers)]
    assert [process.wait() for process in processes] == [0] * writers
    follower.stop()
    found = [(each["writer"], each["number"]) for each in records(stream)]
    assert sorted(found) == [(writer, number) for writer in range(writers) for number in range(LINES)]


def test_a_file_that_nobody_reads_stays_bounded_and_the_next_record_tells_what_was_dropped(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_MOST_WAIT_S", 0.0)
    for _ in range(4):
        logging.getLogger("attnserve").info("x" * 7 * 2**20)
    assert file.stat().st_size < 16 * 2**20
    stream = io.StringIO()
    Follower(file, stream).stop()
    logging.getLogger("attnserve").info("next")
    Follower(file, stream).stop()
    assert [(each["message"][:30], each.get("records")) for each in records(stream)[2:]] == [
        ("log records were dropped", 2),
        ("next", None),
    ]


def test_times_are_in_utc(file: Path) -> None:
    logging.getLogger("attnserve").info("now")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", json.loads(file.read_text())["time"])
