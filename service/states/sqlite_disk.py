"""What can happen to the files of a store in a directory: the disk is full, or files are deleted, replaced or damaged.

On a full disk states can still be deleted and evicted. SQLite appends even a deletion to its log, so the file `reserve` is there to be
given up for it. The reserve is made again as soon as the log has been copied to the database. This copy needs no room, because each
transaction allocates the pages by which the database grows before it is committed.
"""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw

from service.errors import StoreFailed, StoreFull
from service.states.backend import Trouble
from service.states.sqlite_schema import FILE

_RESERVE_BYTES = 4 * 2**20  # more than the log of one call that uses the reserve
_LEAST_BYTES = 2**16
_CHUNK_BYTES = 2**18  # the database grows by so much


class StoreDisk:
    """The files of the store in `folder`; None: in memory, where nothing can happen. Use it on the store's thread, except `trouble`."""

    def __init__(self, folder: Path | None) -> None:
        self.full = False  # whether a call has failed for want of room, and none has been written since
        self.spare = False  # whether the current transaction may use the reserve
        self._folder = folder
        self._damaged: Trouble | None = None
        self._opened: dict[Path, tuple[int, int] | None] = {}
        self._pages = 0  # pages of the database for which its file has room
        self._free_bytes = 0  # of the disk, without the reserve

    def begin(self, db: apsw.Connection) -> None:
        """Prepare to open the database. A service that starts on a full disk has the reserve for it."""
        if self._folder is not None:
            self.release()
            chunk = ctypes.c_int(_CHUNK_BYTES)
            db.file_control("main", apsw.SQLITE_FCNTL_CHUNK_SIZE, ctypes.addressof(chunk))

    def opened(self) -> None:
        """Note which files the store has open."""
        if self._folder is not None:
            paths = [self._folder / name for name in (FILE, f"{FILE}-wal", f"{FILE}-shm", "blobs")]
            self._opened = {path: _identity(path) for path in paths if path.exists()}
            self.reserve()

    def trouble(self) -> Trouble | None:
        """Return what is wrong with the files now, or None."""
        for path, identity in self._opened.items():
            if _identity(path) != identity:
                return Trouble(
                    "lost",
                    f"{path.name} of the store of states was deleted or replaced while the service was running, so nothing would be kept: "
                    "put the files in place and start the service again",
                )
        return self._damaged or (Trouble("full", "the disk of the store of states is full") if self.full else None)

    def check(self) -> None:
        """Raise StoreFailed if files were deleted or replaced. What is written to the open files would be lost with this process."""
        if (trouble := self.trouble()) is not None and trouble.reason == "lost":
            raise StoreFailed(trouble.sentence)

    @contextmanager
    def failing(self, what: str = "the store of states failed", advice: str = "; send the request again later") -> Iterator[None]:
        """Raise StoreFailed, or StoreFull, in place of an error of SQLite or of the disk."""
        try:
            yield
        except (apsw.Error, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, apsw.FullError) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                self.full = True
                raise StoreFull(f"the store of states has no room on its disk: {reason}; delete states, or make room") from error
            if isinstance(error, apsw.CorruptError | apsw.NotADBError):
                repair = f"stop the service, and run `attnserve states rebuild --states {self._folder}`"
                self._damaged = Trouble("damaged", f"the database of the store of states is damaged: {reason}; {repair}")
                raise StoreFailed(self._damaged.sentence) from error
            raise StoreFailed(f"{what}: {reason}{advice}") from error

    # Room ------------------------------------------------------------------------------------------------------------------------------

    def allocate(self, db: apsw.Connection) -> None:
        """Give the database file the size that it has after the current transaction. Raises apsw.FullError."""
        if self._folder is None or (pages := db.pragma("page_count")) <= self._pages:
            return
        size = ctypes.c_longlong(pages * db.pragma("page_size"))
        try:
            db.file_control("main", apsw.SQLITE_FCNTL_SIZE_HINT, ctypes.addressof(size))
        except apsw.IOError as error:
            raise apsw.FullError(f"the database cannot grow to {size.value} bytes") from error
        self._pages = pages

    def check_room(self, db: apsw.Connection, size: int, *, in_file: bool = False) -> None:
        """Raise StoreFull if `size` bytes, in the database or in a file of their own, would take the reserve, which is for deletions."""
        if not self.spare:
            return
        unused = db.pragma("freelist_count") + max(0, self._pages - db.pragma("page_count"))
        whole_pages = size // db.pragma("page_size")  # the rest is on the page of its row
        if size > self._free_bytes if in_file else whole_pages > unused:
            raise StoreFull(f"the disk of the store of states has no room for {size} bytes: delete states, or make room")

    def reserve(self) -> None:
        """Make the reserve, or a smaller one if there is no more room."""
        if self._folder is None:
            return
        size = _RESERVE_BYTES
        while size >= _LEAST_BYTES:
            with suppress(OSError), (self._folder / "reserve").open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                return
            size = size * 3 // 4

    def release(self) -> None:
        """Give up the reserve."""
        if self._folder is not None:
            disk = os.statvfs(self._folder)
            self._free_bytes = disk.f_bavail * disk.f_frsize
            (self._folder / "reserve").unlink(missing_ok=True)

    def restore(self, db: apsw.Connection) -> None:
        """Free the room of SQLite's log, and make the reserve again."""
        with suppress(apsw.Error):
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self.reserve()


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the numbers that identify a file as long as it exists, or None. The file is not opened: closing it would release SQLite's
    locks."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
