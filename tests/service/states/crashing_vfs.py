"""A disk for SQLite that records every write, so that a test can rebuild what any crash would have left; and that fails on demand.

A crash keeps all writes up to a point (kill -9), or loses and tears those that were not synced (power loss). Cf. SQLite's own crash tests
(sqlite.org/testing.html, section 3.3).
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import apsw

_SECTOR = 512


class Event(NamedTuple):
    """`kind`: write, truncate, sync, delete, or a mark of the test. `at`: the offset or size; of a deletion 1 if its folder is synced."""

    kind: str
    file: str = ""
    at: int = 0
    data: bytes = b""
    mark: Any = None


class RecordingVfs(apsw.VFS):
    """Passes everything to the real disk. `fails`: called before each write and sync with their number; an exception is the disk's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[Event] = []
        self.fails: Callable[[int], None] = lambda number: None
        self._calls = 0
        super().__init__(name, "")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # apsw's name
        return _File(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.events.append(Event("delete", Path(filename).name, at=int(syncdir)))
        super().xDelete(filename, syncdir)

    def call(self) -> None:
        self._calls += 1
        self.fails(self._calls)

    def mark(self, what: Any) -> None:
        self.events.append(Event("mark", mark=what))


class _File(apsw.VFSFile):
    def __init__(self, vfs: RecordingVfs, name: Any, flags: list[int]) -> None:
        self._vfs = vfs
        self._name = Path(name.filename()).name if hasattr(name, "filename") else Path(str(name)).name
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        self._vfs.call()
        self._vfs.events.append(Event("write", self._name, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        self._vfs.call()
        self._vfs.events.append(Event("truncate", self._name, size))
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:
        self._vfs.call()
        super().xSync(flags)
        self._vfs.events.append(Event("sync", self._name))


def after_crash(events: list[Event], folder: Path, *, seed: int | None) -> None:
    """Write the files that a crash after these events leaves. `seed` None: kill -9. Else power loss, with what was not synced torn."""
    synced = {event.file: at for at, event in enumerate(events) if event.kind == "sync"}
    chance = random.Random(seed)
    files: dict[str, bytearray] = {}
    for at, event in enumerate(events):
        if event.kind in ("mark", "sync"):
            continue
        data = event.data
        if seed is not None and at > synced.get(event.file, -1) and not (event.kind == "delete" and event.at):
            if chance.random() < 0.5:
                continue
            if event.kind == "write" and chance.random() < 0.5:
                data = data[: chance.randrange(0, len(data) + 1, _SECTOR)]
        if event.kind == "delete":
            files.pop(event.file, None)
            continue
        content = files.setdefault(event.file, bytearray())
        if event.kind == "truncate":
            del content[event.at :]
        else:
            content.extend(bytes(max(0, event.at + len(data) - len(content))))
            content[event.at : event.at + len(data)] = data
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
