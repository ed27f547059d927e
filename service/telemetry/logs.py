"""Logs in JSON, one object per line, with times in RFC 3339.

On one machine all processes append their records to one file, and the command takes what is in it and prints it. Nobody rotates: the file
has only the records that are not printed yet, and a lock keeps a record from being written between the command's read and its truncation.
"""

import fcntl
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TextIO

from pythonjsonlogger.json import JsonFormatter

_MAX_BYTES = 16 * 1024 * 1024  # most bytes of records that are not printed yet
_MOST_WAIT_S = 5.0  # longest time for which a process waits for room; then it drops records until there is room
_LOOK_S = 0.2
_MOST_TRACES = 8


class _Formatter(JsonFormatter):
    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class _SharedFile(logging.Handler):
    """Appends each record to a file from which a `Follower` takes it, even if several processes write to the file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("ab", buffering=0)
        self._dropped = 0
        self._full_since: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self._dropped:
                fields = {"levelname": "WARNING", "name": "attnserve", "msg": "log records were dropped", "records": self._dropped}
                line = f"{self.format(logging.makeLogRecord(fields))}\n{line}"
            self._dropped = 0 if self._append(f"{line}\n".encode()) else self._dropped + 1
        except Exception:
            self.handleError(record)

    def _append(self, lines: bytes) -> bool:
        """Append whole lines. If the file is full, wait until they are taken. Returns False if they are not taken in time."""
        while not self._appended(lines):
            self._full_since = self._full_since or time.monotonic()
            if time.monotonic() - self._full_since >= _MOST_WAIT_S:
                return False
            time.sleep(_LOOK_S / 20)
        self._full_since = None
        return True

    def _appended(self, lines: bytes) -> bool:
        with _locked(self._file):
            if os.fstat(self._file.fileno()).st_size + len(lines) > _MAX_BYTES:
                return False
            self._file.write(lines)
            return True

    def close(self) -> None:
        self._file.close()
        super().close()


def to_file(path: Path | None, level: str) -> None:
    """Write this process's own log records to `path`, which several processes may share. None means stderr."""
    # `sys.stderr` may not be used, because Ray Serve may have replaced it by a logger that drops these records.
    handler: logging.Handler = logging.StreamHandler(sys.__stderr__) if path is None else _SharedFile(path)
    handler.setFormatter(
        _Formatter(
            "{asctime}{levelname}{name}{message}", style="{", rename_fields={"asctime": "time", "levelname": "level", "name": "logger"}
        )
    )
    for name in ("attnserve", "opentelemetry"):  # opentelemetry logs a message when a collector is unreachable
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def traces(traceparents: Iterable[str | None]) -> dict[str, list[str]]:
    """Return the field `trace_ids` of a log record about several requests, with the first few trace ids. Returns an empty dictionary if no
    request is traced.
    """
    ids = dict.fromkeys(each.split("-")[1] for each in traceparents if each is not None)
    return {"trace_ids": list(ids)[:_MOST_TRACES]} if ids else {}


class Follower:
    """Takes the records from a log file and prints them on a stream, until it is stopped. The file may be created later."""

    def __init__(self, path: Path, stream: TextIO = sys.stderr) -> None:
        self._path = path
        self._stream = stream
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Print the remaining records, then stop."""
        self._stopping.set()
        self._thread.join()

    def _follow(self) -> None:
        while True:
            last = self._stopping.wait(_LOOK_S)
            with suppress(OSError):  # the stream is a file on a full disk: what is in its buffer is written later
                self._stream.write(self._take().decode("utf-8", "replace"))
                self._stream.flush()
            if last:
                return

    def _take(self) -> bytes:
        """Return the content of the file, and empty it."""
        try:
            with self._path.open("r+b", buffering=0) as file, _locked(file):
                content = file.readall()
                file.truncate(0)
                return content
        except FileNotFoundError:
            return b""


@contextmanager
def _locked(file: FileIO) -> Iterator[None]:
    """Keep other processes from using the open file. If this process ends, the kernel releases the lock."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
