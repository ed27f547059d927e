"""Starts a Redis with an append-only file, which can be killed and started again with its data."""

import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from loadtest.common.server import Program, free_port, until
from loadtest.errors import LoadtestError


class Redis(Program):
    def __init__(self, folder: Path, *flags: str, port: int | None = None, program: Path | None = None, **how: Any) -> None:
        """`folder` keeps the data. Raises LoadtestError if redis-server is not installed."""
        if (found := program or shutil.which("redis-server")) is None:
            raise LoadtestError("this needs redis-server: apt-get install redis-server")
        self.port = port or free_port()
        kept = ("--dir", str(folder), "--save", "", "--appendonly", "yes")
        arguments = ("--port", str(self.port), "--bind", "127.0.0.1", *kept)
        super().__init__([str(found), *arguments, *flags], **how)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        super().start()
        until(self.answers, "Redis answers", check=self.check)

    def answers(self) -> bool:
        """Return whether Redis answers a PING, also with an error, which it does once it has loaded its append-only file."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        return False
