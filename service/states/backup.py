"""Copies a store in a directory while the service uses it."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw

from service.errors import StoreFailed
from service.states.blob_files import BlobFiles, sync
from service.states.sqlite_schema import FILE


def backup(folder: Path, to: Path, show: Callable[[str, float | None], None] = lambda step, fraction: None) -> tuple[int, int]:
    """Copy the store in `folder`, as it is at one moment, to the directory `to`. Blob files that `to` has already are not copied again.

    Returns the number of states and the number of blob files. If a state is deleted while its file is copied, requests for it to the copy
    get 410. If the backup is interrupted, the index in `to` is that of the previous backup. Raises StoreFailed and OSError.
    """
    source, target, part = BlobFiles(folder), BlobFiles(to), to / f"{FILE}.part"
    part.unlink(missing_ok=True)
    try:
        _copy(source, target, list(source.all()), show)  # before the index, so that few files are left to copy after it
        show("index", None)
        with closing(apsw.Connection(str(folder / FILE), flags=apsw.SQLITE_OPEN_READWRITE)) as db:
            db.set_busy_timeout(10_000)
            db.execute("VACUUM INTO ?", (str(part),))
        with closing(apsw.Connection(str(part))) as copy:
            files = [sha256 for (sha256,) in copy.execute("SELECT DISTINCT sha256 FROM blobs WHERE content IS NULL")]
            states: int = copy.execute("SELECT count(*) FROM states WHERE status = 'ready'").get
    except apsw.Error as error:
        raise StoreFailed(f"the store in {folder} cannot be copied: {type(error).__name__}: {error}") from error
    _copy(source, target, files, show)
    sync(part)
    for suffix in ("-wal", "-shm"):  # left by a service that used the previous backup
        (to / (FILE + suffix)).unlink(missing_ok=True)
    part.replace(to / FILE)
    sync(to)
    return states, len(files)


def _copy(source: BlobFiles, target: BlobFiles, files: list[str], show: Callable[[str, float | None], None]) -> None:
    for at, sha256 in enumerate(files):
        if at % 100 == 0:
            show("blobs", at / len(files))
        source.copy(sha256, target)
