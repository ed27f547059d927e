"""Watches every process while the service runs, and replaces or ends processes that fail.

Ray replaces a dead replica or Serve controller, but it takes half a minute or more to notice a process that hangs. So the command kills a
process that hangs, and Ray replaces it. The command restarts HAProxy itself. Without Ray's own processes no replica can be replaced: if
one of them ends, the command ends with a message and status 1, so that a supervisor starts it again.
"""

import asyncio
import ctypes
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from service.deployment import lifeline
from service.deployment.front import BACKLOG, Front

log = logging.getLogger("attnserve")

_TICK_S = 0.1
_LOOK_S = 0.25
_STOPPED_S = 1.0  # a process counts as hung if it is stopped (SIGSTOP) for more seconds than this; a debugger may stop it for milliseconds
_SILENT_S = 30.0  # a replica counts as hung after this many seconds without a heartbeat and without using CPU time
_LIVE = "/health/live"
_MOST_ANSWERS = 256
_ANSWER_S = 10.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, linux/prctl.h


@dataclass(eq=False)
class _WatchedReplica:
    """The data that the command has about one replica, including its end of the lifeline (the connection to the replica)."""

    kind: str
    process: psutil.Process
    writer: asyncio.StreamWriter
    drained: asyncio.Future[int]
    place: Path | None = None
    loop_runs: bool = True
    heard: float = field(default_factory=time.monotonic)
    cpu_s: float = 0.0


def adopt() -> None:
    """Make this process the parent of all orphaned descendants, so that it can find and end them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


class Watch:
    """A thread that watches processes from `start` to `stop`. If the service cannot continue, it calls `on_end` once, with the reason."""

    def __init__(self, run: Path, front: Front, on_end: Callable[[str], None]) -> None:
        self._run = run
        self._front = front
        self._on_end = on_end
        self._essential: dict[str, psutil.Process] = {}
        self._replicas: set[_WatchedReplica] = set()
        self._stopped_since: dict[int, float] = {}
        self._family: list[psutil.Process] = []
        self._standing_in: asyncio.Server | None = None
        self._answers = 0
        self._ended = threading.Event()
        self._listening = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread, and return when replicas can connect to this process."""
        self._thread.start()
        self._listening.wait()

    def stop(self) -> None:
        self.cease()
        self._thread.join()

    def cease(self) -> None:
        """Stop watching. Call it before processes are ended on purpose."""
        self._ended.set()

    def drain(self, timeout_s: float) -> int:
        """Make the ingress replicas finish accepted requests and reject new ones. Returns how many requests were
        unfinished after `timeout_s` seconds.
        """
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._drain(timeout_s), self._loop).result()

    async def _drain(self, timeout_s: float) -> int:
        draining = [replica for replica in self._replicas if replica.kind == "ingress"]
        for replica in draining:
            replica.writer.write(str(timeout_s).encode())
        if draining:
            await asyncio.wait([replica.drained for replica in draining], timeout=timeout_s + _ANSWER_S)
        return sum(replica.drained.result() for replica in draining if replica.drained.done())

    def cannot_lose(self, processes: dict[str, psutil.Process]) -> None:
        """Record the processes, by name, without which the service cannot continue."""
        self._essential = dict(processes)

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_unix_server(self._hear, self._run / lifeline.SOCKET)
        self._listening.set()
        looked = 0.0
        try:
            while not self._ended.is_set():
                try:
                    self._front.keep()
                    await self._stand_in()
                    if (now := time.monotonic()) - looked >= _LOOK_S:
                        looked = now
                        if (sentence := self._look(now)) and not self._ended.is_set():
                            self._ended.set()
                            self._on_end(sentence)
                except Exception:  # the watching thread must survive any error
                    log.exception("checking the service's processes failed")
                await asyncio.sleep(_TICK_S)
        finally:
            server.close()  # without `wait_closed`: since Python 3.12 it waits until every replica has closed its line

    # Replicas ------------------------------------------------------------------------------------------------------------------------

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one replica's lifeline, from its first message until the connection closes."""
        hello = json.loads(await reader.readline())
        drained = asyncio.get_running_loop().create_future()
        replica = _WatchedReplica(hello["kind"], psutil.Process(hello["pid"]), writer, drained)
        log.info("replica started", extra={"kind": replica.kind, "pid": replica.process.pid})
        if replica.kind == "ingress":
            self._give_listener(replica)
        self._replicas.add(replica)
        try:
            while said := await reader.readline():
                replica.heard = time.monotonic()
                if said.startswith(lifeline.DRAINED):
                    drained.set_result(int(said[len(lifeline.DRAINED) :]))
                else:
                    replica.loop_runs = said == lifeline.LOOP_RUNS
        except (ConnectionError, asyncio.CancelledError):  # a cancellation ends the watch; uncaught, Python 3.11 would print it
            pass
        finally:
            self._replicas.discard(replica)
            if not drained.done():
                drained.set_result(0)  # 0 unfinished requests, because the process has ended
            writer.close()
            if not self._ended.is_set():
                log.warning("replica ended", extra={"kind": replica.kind, "pid": replica.process.pid})

    def _give_listener(self, replica: _WatchedReplica) -> None:
        taken = {each.place for each in self._replicas}
        replica.place, listener = self._front.place(lambda path: path in taken)
        with listener, socket.socket(fileno=socket.dup(replica.writer.get_extra_info("socket").fileno())) as line:
            socket.send_fds(line, [b"+"], [listener.fileno()])

    # Processes -----------------------------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> str | None:
        """Kill processes that hang. Returns the reason if the service cannot continue, else None."""
        for name, process in self._essential.items():
            if _has_ended(process):
                return f"{name} (pid {process.pid}) has ended, and nothing can be replaced without it: start the service again"
        if not self._family or int(now) % 5 == 0:
            self._family = psutil.Process().children(recursive=True)
        watched = {process.pid: process for process in (*self._family, *(replica.process for replica in self._replicas))}
        if self._front.pid is not None:
            with suppress(psutil.NoSuchProcess):  # HAProxy has just ended; `keep` will restart it
                watched.setdefault(self._front.pid, psutil.Process(self._front.pid))
        for process in watched.values():
            if not self._stopped(process, now):
                continue
            for name, essential in self._essential.items():
                if essential.pid == process.pid:
                    return f"{name} (pid {process.pid}) is stopped and does not answer: start the service again"
            self._kill(process, "is stopped")
        for replica in self._replicas:
            if now - replica.heard > _SILENT_S and not self._works(replica, now):
                self._kill(replica.process, f"has given no sign of life for {_SILENT_S:.0f} s")
        return None

    def _stopped(self, process: psutil.Process, now: float) -> bool:
        """Return whether the process has been stopped (SIGSTOP) for at least `_STOPPED_S`."""
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                return now - self._stopped_since.setdefault(process.pid, now) >= _STOPPED_S
        self._stopped_since.pop(process.pid, None)
        return False

    @staticmethod
    def _works(replica: _WatchedReplica, now: float) -> bool:
        """Return whether a silent replica has used CPU time since the previous call. If so, the limit on its silence starts
        again.
        """
        try:
            used = sum(replica.process.cpu_times()[:2])
        except psutil.Error:
            return True  # an error means that the process has ended, which is noticed elsewhere
        if used - replica.cpu_s < 0.1:
            return False
        replica.cpu_s, replica.heard = used, now
        return True

    def _kill(self, process: psutil.Process, why: str) -> None:
        with suppress(psutil.Error):
            log.error("a process that hangs is killed", extra={"pid": process.pid, "title": process.name(), "why": why})
            process.kill()
        self._stopped_since.pop(process.pid, None)

    # Answers while there is no replica (lean) ------------------------------------------------------------------------------------------

    async def _stand_in(self) -> None:
        """Accept connections at the port while no ingress replica exists or its event loop is busy."""
        wanted = self._front.lean and not any(each.kind == "ingress" and each.loop_runs for each in self._replicas)
        if wanted and self._standing_in is None:
            with suppress(OSError):  # the socket is closed because the service ends
                self._standing_in = await asyncio.start_server(self._answer, sock=self._front.listener.dup(), backlog=BACKLOG)
        elif not wanted and self._standing_in is not None:
            self._standing_in.close()
            self._standing_in = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request: 200 to a liveness probe, 503 to anything else."""
        self._answers += 1
        try:
            if self._answers <= _MOST_ANSWERS:
                async with asyncio.timeout(_ANSWER_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._said(head))
                    await writer.drain()
                    writer.write_eof()
                    while await reader.read(65536):  # read all input: closing with unread input resets the connection and loses the answer
                        pass
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._answers -= 1
            writer.close()

    def _said(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0].decode("latin-1")
        busy = any(each.kind == "ingress" for each in self._replicas)
        if path == _LIVE and busy:
            status, kind, body = "200 OK", "text/plain; charset=utf-8", b"live"
        else:
            message = "the replica is busy: send the request again" if busy else "no replica is there for the request: send it again"
            error = {"message": message, "type": "service_unavailable_error", "param": None, "code": None}
            status, kind, body = "503 Service Unavailable", "application/json", json.dumps({"error": error, "message": message}).encode()
        lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", "connection: close"]
        lines += [] if status.startswith("200") else ["retry-after: 1"]
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if method == b"HEAD" else body)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
