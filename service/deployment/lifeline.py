"""A replica's connection to the command that started it: it receives its listening socket, sends a heartbeat, and is told to drain.

It is a unix socket. The kernel closes it when the process ends in any way, so the command knows at once. A thread of its own writes the
heartbeat twice a second, so a process with a busy event loop is not taken for a dead one. The command's end of it is
`service/deployment/watch.py`.
"""

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

SOCKET = "lifeline.sock"  # in the run directory
LOOP_RUNS, LOOP_IS_BUSY = b"+\n", b"-\n"
DRAINED = b"="  # followed by the number of unfinished requests and a newline
_BEAT_S = 0.5
_BUSY_AFTER_S = 1.0


class Lifeline:
    """`kind` is what the process does: ingress, encoder or generator. An ingress is sent a listening socket."""

    def __init__(self, run: Path, kind: str, pid: int) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.settimeout(30)
        self._line.connect(str(run / SOCKET))
        self._line.sendall(json.dumps({"kind": kind, "pid": pid}).encode() + b"\n")
        self._turned = time.monotonic()

    def listener(self) -> socket.socket:
        """The listening socket of an ingress. Blocks until the command has answered, within 30 s."""
        _, descriptors, _, _ = socket.recv_fds(self._line, 1, 1)
        if not descriptors:
            raise ConnectionError("the command that started this replica has ended")
        return socket.socket(fileno=descriptors[0])

    def beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send a heartbeat twice a second for as long as this process lives, which also says whether `loop` runs."""
        threading.Thread(target=self._beat, args=(loop,), name="lifeline", daemon=True).start()

    def await_drain(self, loop: asyncio.AbstractEventLoop, drain: Callable[[float], Coroutine[Any, Any, int]]) -> None:
        """When the command asks, call `drain` on `loop` with the seconds it may take, and send back its result."""
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
