"""A replica's connection to the command that started it. The replica receives its listening socket and the drain order (finish accepted
requests, reject new ones), and sends heartbeats.

The connection is a unix socket. The kernel closes it when the process ends in any way, so the command notices at once. A separate thread
writes the heartbeat twice a second, so a process with a busy event loop is not mistaken for a hung process. The command's side is in
`service/deployment/watch.py`.
"""

import asyncio
import json
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

SOCKET = "lifeline.sock"  # name of the unix socket in the run directory
LOOP_RUNS, LOOP_IS_BUSY = b"+\n", b"-\n"
DRAINED = b"="  # answer to a drain: this byte, the number of unfinished requests, a newline
_BEAT_S = 0.5
_BUSY_AFTER_S = 1.0


def keep_files_in(run: Path) -> None:
    """Put this process's temporary files into the run directory, which is removed even if this process is killed, unless TMPDIR is set."""
    if "TMPDIR" not in os.environ:
        tempfile.tempdir = str(run)


class Lifeline:
    """A replica's connection to the command. `kind` is ingress, encoder or generator; only an ingress gets a listening socket."""

    def __init__(self, run: Path, kind: str, pid: int) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.settimeout(30)
        self._line.connect(str(run / SOCKET))
        self._line.sendall(json.dumps({"kind": kind, "pid": pid}).encode() + b"\n")
        self._turned = time.monotonic()

    def listener(self) -> socket.socket:
        """Receive the listening socket of an ingress. Blocks for up to 30 s until the command sends it."""
        _, descriptors, _, _ = socket.recv_fds(self._line, 1, 1)
        if not descriptors:
            raise ConnectionError("the command that started this replica has ended")
        return socket.socket(fileno=descriptors[0])

    def beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a thread that sends a heartbeat twice a second until the process ends. Each heartbeat tells whether the event loop `loop`
        responds.
        """
        threading.Thread(target=self._beat, args=(loop,), name="lifeline", daemon=True).start()

    def await_drain(self, loop: asyncio.AbstractEventLoop, drain: Callable[[float], Coroutine[Any, Any, int]]) -> None:
        """Start a thread that waits for a drain order. Then it calls `drain` on `loop` with the seconds that draining may take, and sends
        the result to the command.
        """
        threading.Thread(target=self._await_drain, args=(loop, drain), name="drain", daemon=True).start()

    def _await_drain(self, loop: asyncio.AbstractEventLoop, drain: Callable[[float], Coroutine[Any, Any, int]]) -> None:
        with suppress(OSError, RuntimeError):
            select.select([self._line], [], [])
            if said := self._line.recv(64):
                unfinished = asyncio.run_coroutine_threadsafe(drain(float(said)), loop).result()
                self._line.sendall(DRAINED + b"%d\n" % unfinished)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(OSError, RuntimeError):  # the command or the loop has ended
            while True:
                loop.call_soon_threadsafe(self._turn)
                time.sleep(_BEAT_S)
                self._line.sendall(LOOP_RUNS if time.monotonic() - self._turned < _BUSY_AFTER_S else LOOP_IS_BUSY)

    def _turn(self) -> None:
        self._turned = time.monotonic()
