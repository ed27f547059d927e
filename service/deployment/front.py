"""The port of a service on one machine. The command keeps it open from start to end, so a connection is never refused.

HAProxy accepts the connections. If HAProxy ends, it is restarted, and new connections wait in the kernel's queue for a tenth of a second.
With the setting `lean` there is no HAProxy: the replica accepts connections at the same socket, and while there is no replica, the command
answers 503 (`service/deployment/watch.py`).
"""

import logging
import math
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from service.deployment import haproxy
from service.errors import AttnserveError
from service.settings import Settings

log = logging.getLogger("attnserve")

BACKLOG = 2048
_SPARE = 2  # number of extra sockets: a new gateway may start before the one that it replaces has ended
_HARD_STOP_MARGIN_S = 60


class PortTaken(AttnserveError):
    """The service cannot listen at its address."""


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket, even if a previous service has just closed the port. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6()
        )
    except OSError as error:
        raise PortTaken(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another with --port, or stop the program that uses it."
        ) from error


class Front:
    """The listening socket, the gateways' sockets, and the HAProxy that forwards connections from the listening socket to the gateways'
    sockets.
    """

    def __init__(self, settings: Settings, run: Path, listener: socket.socket) -> None:
        self.listener = listener
        self.lean = settings.lean
        count = 1 if settings.profile == "single" else settings.most("gateways")
        self._places = [run / f"gateway-{number}.sock" for number in range(count + _SPARE)]
        self._several = count > 1
        self._config = run / "haproxy.cfg"
        self._output = run / "haproxy.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._hard_stop_s = math.ceil(settings.request_timeout_s) + _HARD_STOP_MARGIN_S
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start HAProxy, which answers 503 until there is a gateway. With `lean`, do nothing."""
        if not self.lean:
            nowhere, fd = self._config.parent / "nowhere.sock", self.listener.fileno()
            config = haproxy.one_machine(
                listener=fd,
                gateways=self._places,
                several=self._several,
                nowhere=nowhere,
                hard_stop_s=self._hard_stop_s,
                connections=haproxy.most_connections(),
            )
            self._config.write_text(config)
            self.keep()

    def keep(self) -> None:
        """Restart HAProxy if it has ended."""
        if self.lean or self._closed or (self._process is not None and self._process.poll() is None):
            return
        if self._process is not None:
            log.error("HAProxy has ended (status %s) and is started again", self._process.returncode)
        # setpriv makes the kernel kill HAProxy when the command ends in any way.
        command = ["setpriv", "--pdeathsig", "KILL", str(haproxy.binary()), "-db", "-q", "-f", str(self._config)]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                pass_fds=[self.listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so Ctrl-C reaches only the command, which lets accepted requests finish first
            )

    def place(self, taken: Callable[[Path], bool]) -> tuple[Path | None, socket.socket]:
        """Return (path, listening socket) for a new gateway. `taken(path)` tells whether another gateway uses the path. With `lean` the
        path is None and the socket is the port's own. Raises LookupError if all paths are taken.
        """
        if self.lean:
            return None, self.listener.dup()
        for path in self._places:
            if not taken(path):
                path.unlink(missing_ok=True)
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind(str(path))
                listener.listen(BACKLOG)
                return path, listener
        raise LookupError("all sockets for gateways are taken")

    def close(self) -> None:
        """Stop accepting connections, because HAProxy would answer new ones with 503 while the service ends. Open connections continue."""
        self._closed = True
        self.listener.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        self._closed = True
        self.listener.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
