"""Logs in JSON, one object per line. On one machine all replicas write to one file of bounded size, and the command prints its lines."""

import logging
import logging.handlers
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from pythonjsonlogger.json import JsonFormatter

_MAX_BYTES = 16 * 1024 * 1024
_MOST_TRACES = 8


def to_file(path: Path | None, level: str) -> None:
    """Write this process's own log records to `path`, rotated so that all files together stay under 32 MiB. None means stderr."""
    # `sys.stderr` may not be used, because Ray Serve may have replaced it by a logger that drops these records.
    handler: logging.Handler = logging.StreamHandler(sys.__stderr__)
    if path is not None:
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(
        JsonFormatter(
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
    """Copies new lines of a log file to a stream until it is stopped. The file may be created later, and may be rotated."""

    def __init__(self, path: Path, stream: TextIO = sys.stderr) -> None:
        self._path = path
        self._stream = stream
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Copy the remaining lines, then stop."""
        self._stopping.set()
        self._thread.join()

    def _follow(self) -> None:
        position = 0
        while True:
            last = self._stopping.wait(0.2)
            try:
                if self._path.stat().st_size < position:
                    position = 0
                with self._path.open(encoding="utf-8") as file:
                    file.seek(position)
                    self._stream.write(file.read())
                    position = file.tell()
                self._stream.flush()
            except FileNotFoundError:
                pass
            if last:
                return
