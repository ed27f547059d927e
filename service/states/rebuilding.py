"""Rebuilds the damaged index of a store in a directory. As SQLite's command `.dump` does, it reads each table from both ends, up to the
first row that cannot be read.

The rows between are lost, unless a backup has them. The new index replaces the old one only when it is complete, so the work can be stopped
and repeated.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import apsw

from service.errors import StoreFailed
from service.states.blob_files import BlobFiles, sync
from service.states.record import Status
from service.states.sqlite_schema import COUNT, FIELDS, FILE, SCHEMA, VERSION

_TABLES = {  # copied tables with their columns; the table `tenants` is computed from the others
    "blobs": "id, tenant, sha256, size, content, refs, pins",
    "states": f"seq, {FIELDS}, ids, blob",
    "documents": "seq, kind, id, tenant, body, version, due, expires",
    "names": "tenant, name, state, version",
    "keys": "tenant, key, digest, state, created",
}


@dataclass(frozen=True)
class Rebuilt:
    """The numbers of rows in the new index."""

    states: int
    damaged: int  # states whose bytes are missing: requests for them get 410
    names: int
    documents: int


def rebuild(folder: Path) -> Rebuilt:
    """Rebuild the index of the store in `folder`. Raises OSError, or StoreFailed if a process has it open or nothing can be read."""
    _check_closed(folder)
    apart, new = folder / "damaged" / f"index-{time.time_ns()}", folder / f"{FILE}.part"
    apart.mkdir(parents=True, mode=0o700)
    for suffix in ("", "-wal"):
        if (file := folder / (FILE + suffix)).is_file():
            shutil.copyfile(file, apart / file.name)
    new.unlink(missing_ok=True)
    try:
        with closing(apsw.Connection(str(new))) as db, closing(apsw.Connection(str(apart / FILE))) as old:
            db.pragma("journal_mode", "off")  # no journal, since an incomplete index is discarded
            db.execute(SCHEMA)
            with db:
                made = _fill(db, old, BlobFiles(folder))
            db.pragma("user_version", VERSION)
            db.pragma("journal_mode", "wal")
    except apsw.Error as error:
        raise StoreFailed(
            f"SQLite could not read the index of {folder} ({type(error).__name__}: {error}): serve the newest backup of the folder"
        ) from error
    sync(new)
    for suffix in ("-wal", "-shm"):  # SQLite would apply the old index's log to the new index
        (folder / (FILE + suffix)).unlink(missing_ok=True)
    new.replace(folder / FILE)
    sync(folder)
    return made


def _rows(old: apsw.Connection, table: str, columns: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table in order until one cannot be read, then rows from the table's end backwards."""
    key = {"names": "tenant DESC, name DESC", "keys": "tenant DESC, key DESC"}.get(table, "rowid DESC")
    # A row in a damaged page may have any values.
    sane = f"NOT INDEXED WHERE json_valid(metadata) AND status IN {get_args(Status)}" if table == "states" else "NOT INDEXED"
    try:
        yield from old.execute(f"SELECT {columns} FROM {table} {sane}")
    except (apsw.CorruptError, UnicodeError):
        with suppress(apsw.CorruptError, UnicodeError):
            yield from old.execute(f"SELECT {columns} FROM {table} {sane} ORDER BY {key}")


def _fill(db: apsw.Connection, old: apsw.Connection, files: BlobFiles) -> Rebuilt:
    """Copy the readable rows of the index `old` to `db`, and compute what follows from them."""
    for table, columns in _TABLES.items():
        values = ", ".join("?" * len(columns.split(", ")))
        db.executemany(f"INSERT OR IGNORE INTO {table}({columns}) VALUES ({values})", _rows(old, table, columns))
    # The row of a blob may be lost while its file is there.
    lost = "SELECT blob, tenant, sha256, size FROM states WHERE status = 'ready' AND blob NOT IN (SELECT id FROM blobs)"
    rows: list[Any] = db.execute(lost).fetchall()
    for row in rows:
        if files.has(row[2], row[3]):
            db.execute("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?, NULL, 0, 0)", row)
    end = "UPDATE states SET status = 'damaged', pinned = 0, used = ?, blob = NULL WHERE status = 'ready' AND "
    db.execute(end + "coalesce(blob, 0) NOT IN (SELECT id FROM blobs)", (time.time(),))
    damaged = db.changes()
    # The rows of the children of deleted states may be lost.
    db.execute("UPDATE states SET used = -9e999 WHERE status != 'ready' AND used = 9e999")
    db.execute("DELETE FROM blobs WHERE id NOT IN (SELECT blob FROM states WHERE blob IS NOT NULL)")
    kept = {sha256 for (sha256,) in db.execute("SELECT sha256 FROM blobs WHERE content IS NULL")}
    for name in set(files.all()) - kept:
        files.set_apart(name)
    _count(db)
    count = {table: int(db.execute(f"SELECT count(*) FROM {table}").get) for table in ("names", "documents")}
    return Rebuilt(int(db.execute("SELECT count(*) FROM states WHERE status = 'ready'").get), damaged, count["names"], count["documents"])


def _count(db: apsw.Connection) -> None:
    """Compute the blobs' numbers of references and pins, and the tenants' usage, from the copied rows.

    A version of a name must never be used twice, but the old versions may be lost. So the versions of new names begin above the current
    Unix time in seconds, which is higher than any old version.
    """
    db.execute("DELETE FROM names WHERE state NOT IN (SELECT id FROM states WHERE status = 'ready')")
    db.execute("DELETE FROM keys WHERE state NOT IN (SELECT id FROM states)")
    db.execute(
        "UPDATE blobs SET refs = (SELECT count(*) FROM states WHERE blob = blobs.id), "
        "pins = (SELECT count(*) FROM states WHERE blob = blobs.id AND pinned)"
    )
    db.execute(
        f"{COUNT} (SELECT tenant, ? AS version_floor FROM (SELECT tenant FROM states UNION SELECT tenant FROM documents)) t",
        (int(time.time()),),
    )


def _check_closed(folder: Path) -> None:
    """Raise StoreFailed if a process has the store open. Every such process holds a lock on the file."""
    try:
        with closing(apsw.Connection(str(folder / FILE), flags=apsw.SQLITE_OPEN_READWRITE)) as db:
            db.pragma("locking_mode", "exclusive")
            db.execute("BEGIN EXCLUSIVE; ROLLBACK")
    except apsw.BusyError:
        raise StoreFailed(f"a process has the store in {folder} open: stop the service first") from None
    except apsw.Error:
        pass  # the database is damaged, which does not matter here
