"""The real service: `attnserve serve` in a process of its own, with Ray and HAProxy, on a free port."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from service.deployment.ports import free_port

_START_S, _STOP_S = 600, 600  # longer than this is a hang, also on a slow machine whose cores others use


class LiveService:
    """A running `attnserve serve`. `output` is everything it has written so far."""

    def __init__(
        self,
        bundles: Sequence[Path],
        *flags: str,
        port: int | None = None,
        env: dict[str, str] | None = None,
        folder: Path | None = None,
        streams: str = "",
    ) -> None:
        """`folder` is the working directory, and `streams` has the shell's words that close or move standard streams. The service has a
        process group of its own, as a command in a terminal has.
        """
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        handle, name = tempfile.mkstemp(suffix=".log")
        self._log = Path(name)
        self._last_words: str | None = None
        command = [
            "sh",
            "-c",
            f'exec "$@" {streams}',
            "sh",
            sys.executable,
            "-P",
            "-m",
            "service.cli",
            "serve",
            "--port",
            str(self.port),
            *flags,
        ]
        command += [part for bundle in bundles for part in ("--bundle", str(bundle))]
        with os.fdopen(handle, "w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=folder,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text() if self._last_words is None else self._last_words

    def wait_for(self, text: str) -> None:
        """Until the service has written `text`; an AssertionError with its output if it ends or hangs before."""
        for _ in range(_START_S * 20):
            if text in self.output:
                return
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            break
        assert text in self.output, self.output

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self, number: int = signal.SIGTERM, *, group: bool = False) -> int:
        """Ask to stop, with `group` as a terminal does, and wait: the exit status."""
        if self.process.poll() is None:
            (os.killpg if group else os.kill)(self.process.pid, number)
        status = self.process.wait(_STOP_S)
        if self._last_words is None:
            self._last_words = self._log.read_text()
            self._log.unlink()
        return status


@contextmanager
def live(bundles: Sequence[Path], *flags: str, **how: Any) -> Iterator[LiveService]:
    """A service that is ready, stopped at the end whatever happens."""
    service = LiveService(bundles, *flags, **how)
    try:
        service.wait_for("ready at")
        yield service
    finally:
        service.stop()
