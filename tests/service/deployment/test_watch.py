"""The watch over the service's processes, beside what the tests of survival show of it."""

import json
import logging
import os
import socket
import time
from pathlib import Path

import pytest

from service.deployment import lifeline
from service.deployment.watch import Watch


class NoFront:
    """A front without a process."""

    pid, lean = None, False

    def keep(self) -> None:
        pass


def test_it_ends_without_a_complaint_while_replicas_are_connected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(tmp_path, NoFront(), pytest.fail)  # type: ignore[arg-type]
    watch.start()
    with caplog.at_level(logging.INFO), socket.socket(socket.AF_UNIX) as line:
        line.connect(str(tmp_path / lifeline.SOCKET))
        line.sendall(json.dumps({"kind": "encoder", "pid": os.getpid()}).encode() + b"\n")
        while "replica started" not in caplog.messages:
            time.sleep(0.01)
        watch.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
