"""Rebuilds the index of a store in a directory from the readable rows of the old index and from the files of blobs.

Rows that SQLite can read are copied one by one. If the row of a state is lost, the state is recovered from the record in its blob's file,
or from the header of a blob inside the database. Lost forks of this state cannot be recovered, since they have the same blob. The new
index replaces the old one only when it is complete, so the work can be stopped and repeated.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import apsw
import orjson

from service.errors import InvalidRequest, StoreFailed
from service.states.blob import MOST_HEADER_BYTES, PREFIX_BYTES, read_header
from service.states.blob_files import BlobFiles, sync
from service.states.record import ID, StateRecord, Status, new_state_id
from service.states.sqlite_schema import FIELDS, FILE, SCHEMA, VERSION, row_of

_TABLES = {  # copied tables with their columns; the table `tenants` is computed from the others
    "blobs": "id, tenant, sha256, size, content, refs, pins",
    "states": f"seq, {FIELDS}, ids, blob",
    "documents": "seq, kind, id, tenant, body, version, due, expires",
    "names": "tenant, name, state, version",
    "keys": "tenant, key, digest, state, created",
}
_KEYS = {"blobs": "id", "states": "seq", "documents": "seq"}  # table -> its integer key; the other tables have no rowid
_PAGE = 4096
_LAST = 2**62


@dataclass
class Rebuilt:
    """The numbers of rows in the new index. Of its `states`, `recovered` had no readable row in the old index and were restored
    from blobs.
    """

    states: int = 0
    recovered: int = 0
    damaged: int = 0  # states whose bytes are damaged or missing: requests for them get 410
    names: int = 0
    documents: int = 0
    unreadable: bool = False  # whether parts of the old index could not be read


def rebuild(folder: Path, show: Callable[[str, float | None], None] = lambda step, fraction: None) -> Rebuilt:
    """Rebuild the index of the store in `folder`. Raises StoreFailed if a process has the store open, and OSError."""
    _check_closed(folder)
    files, new = BlobFiles(folder), folder / "rebuilding" / FILE
    new.parent.mkdir(exist_ok=True, mode=0o700)
    _remove(new)
    try:
        db = apsw.Connection(str(new))
        db.pragma("journal_mode", "off")  # no journal, since an incomplete index is discarded
        db.pragma("synchronous", "off")
        db.execute(SCHEMA)
        with db:
            made = _Rebuilding(db, files, show).run(folder)
        db.pragma("user_version", VERSION)
        db.pragma("journal_mode", "wal")
        db.close()
    except apsw.Error as error:
        raise StoreFailed(f"the index of {folder} cannot be rebuilt: {type(error).__name__}: {error}") from error
    sync(new)
    _take_place(new, folder)
    return made


class _Rebuilding:
    """Fills the new index `db` from the old index and the files of blobs."""

    def __init__(self, db: apsw.Connection, files: BlobFiles, show: Callable[[str, float | None], None]) -> None:
        self._db, self._files, self._show = db, files, show
        self._made = Rebuilt()

    def run(self, folder: Path) -> Rebuilt:
        old, made = _open(folder), self._made
        if old is None:
            made.unreadable = True
        else:
            for table, columns in _TABLES.items():
                self._copy(old, table, columns)
            old.close()
        self._show("blobs without a state", None)
        self._recover()
        self._count()
        made.states = self._one("SELECT count(*) FROM states WHERE status = 'ready'")
        made.names, made.documents = self._one("SELECT count(*) FROM names"), self._one("SELECT count(*) FROM documents")
        return made

    def _copy(self, old: apsw.Connection, table: str, columns: str) -> None:
        self._show(table, None)
        into = f"INSERT OR IGNORE INTO {table}({columns}) VALUES ({', '.join('?' * len(columns.split(', ')))})"
        rows, made = _Rows(old, table, columns), self._made
        for at, row in enumerate(rows):
            if (table == "blobs" and not self._is_whole(row)) or (table == "states" and not _is_state(row)):
                made.unreadable = True
                continue
            try:
                self._db.execute(into, row)
            except apsw.ConstraintError:  # the damaged row violates a constraint of the table
                made.unreadable = True
            if at % 500 == 499:
                self._show(table, rows.fraction)
        made.unreadable |= rows.damaged

    def _is_whole(self, row: tuple[Any, ...]) -> bool:
        """Return whether the bytes of this row of `blobs` match their hash. For a blob in a file: whether the file exists in full size."""
        _, _, sha256, size, content, *_ = row
        if content is None:
            return isinstance(sha256, str) and isinstance(size, int) and self._files.has(sha256, size)
        return isinstance(content, bytes) and hashlib.sha256(content).hexdigest() == sha256

    def _recover(self) -> None:
        """Recover a state for each blob that no state uses, from the blob's record or header. Mark states without a blob as damaged."""
        of_states = (
            "INSERT OR IGNORE INTO blobs SELECT NULL, tenant, sha256, size, NULL, 0, 0 FROM states WHERE sha256 = ? AND status = 'ready'"
        )
        self._db.execute("CREATE INDEX by_hash ON states(sha256)")
        for name in list(self._files.all()):
            if self._one("SELECT count(*) FROM blobs WHERE sha256 = ?", name):
                continue
            self._db.execute(of_states, (name,))
            if self._db.changes():
                continue
            if (found := self._of_file(name)) is None:
                self._files.set_apart(name)
            else:
                self._db.execute("INSERT INTO blobs VALUES (NULL, ?, ?, ?, NULL, 0, 0)", (found[0].tenant, name, found[0].size))
        self._db.execute("DROP INDEX by_hash")
        same = "SELECT id FROM blobs b WHERE b.tenant = states.tenant AND b.sha256 = states.sha256"
        self._db.execute(f"UPDATE states SET blob = ({same}) WHERE status = 'ready'")
        end = "UPDATE states SET status = 'damaged', pinned = 0, used = ? WHERE status = 'ready' AND blob IS NULL"
        self._db.execute(end, (time.time(),))
        self._made.damaged = self._db.changes()
        self._db.execute(
            "UPDATE states SET used = -9e999 WHERE status != 'ready' AND used = 9e999"
        )  # the rows of their children may be lost
        alone = "SELECT id, tenant, sha256, content FROM blobs WHERE id NOT IN (SELECT blob FROM states WHERE blob IS NOT NULL)"
        rows: list[Any] = self._db.execute(alone).fetchall()
        for blob_id, tenant, sha256, content in rows:
            found = self._of_file(sha256) if content is None else _of_header(content, sha256, len(content))
            if found is None:
                self._db.execute("DELETE FROM blobs WHERE id = ?", (blob_id,))
            else:
                self._insert(replace(found[0], tenant=tenant), found[1], blob_id)

    def _of_file(self, sha256: str) -> tuple[StateRecord, bytes] | None:
        """Return the state for which a file was written, and its token ids, or None if they cannot be read.

        Files of earlier releases have no record. Their state comes from the blob's header, which names no tenant.
        """
        try:
            return row_of(self._files.record(sha256) or {})
        except (KeyError, TypeError, ValueError):
            return _of_header(self._files.read(sha256, PREFIX_BYTES + MOST_HEADER_BYTES), sha256)

    def _insert(self, record: StateRecord, ids: bytes, blob_id: int) -> None:
        if self._one("SELECT count(*) FROM states WHERE id = ?", record.id):  # the state was deleted, but a fork of it had the same blob
            record, ids = replace(record, id=new_state_id(), parent=record.id, origin="fork"), b""
        values = {name: getattr(record, name) for name in FIELDS.split(", ")}
        values |= {"metadata": orjson.dumps(record.metadata).decode(), "status": "ready", "ids": ids, "blob": blob_id}
        self._db.execute(f"INSERT INTO states({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", tuple(values.values()))
        self._made.recovered += 1

    def _count(self) -> None:
        """Compute the blobs' numbers of references and pins, and the tenants' usage, from the copied rows.

        A version of a name must never be used twice, but the old versions may be lost. So the versions of new names begin above the current
        Unix time in seconds, which is higher than any old version.
        """
        self._db.execute("DELETE FROM names WHERE state NOT IN (SELECT id FROM states WHERE status = 'ready')")
        self._db.execute("DELETE FROM keys WHERE state NOT IN (SELECT id FROM states)")
        self._db.execute(
            "UPDATE blobs SET refs = (SELECT count(*) FROM states WHERE blob = blobs.id), "
            "pins = (SELECT count(*) FROM states WHERE blob = blobs.id AND pinned)"
        )
        self._db.execute(
            "INSERT INTO tenants SELECT tenant, "
            "(SELECT count(*) FROM states s WHERE s.tenant = t.tenant AND status = 'ready'), "
            "(SELECT coalesce(sum(size), 0) FROM blobs b WHERE b.tenant = t.tenant) "
            "+ (SELECT coalesce(sum(length(body)), 0) FROM documents d WHERE d.tenant = t.tenant), "
            "(SELECT coalesce(sum(size), 0) FROM blobs b WHERE b.tenant = t.tenant AND pins), ? "
            "FROM (SELECT tenant FROM states UNION SELECT tenant FROM documents) t",
            (int(time.time()),),
        )

    def _one(self, query: str, *values: str) -> int:
        return int(self._db.execute(query, values).get)


class _Rows:
    """Iterates over the readable rows of a table. After the iteration, `damaged` is whether there were unreadable rows."""

    def __init__(self, db: apsw.Connection, table: str, columns: str) -> None:
        self._db, self._table, self._columns = db, table, columns
        self.damaged = False
        self.fraction: float | None = None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self._by_key(_KEYS[self._table]) if self._table in _KEYS else self._from_both_ends()

    def _by_key(self, key: str) -> Iterator[tuple[Any, ...]]:
        """Yield rows read one at a time in the order of `key`, without the unreadable rows and pages."""
        last = self._next(f"SELECT {key} FROM {self._table} NOT INDEXED ORDER BY {key} DESC LIMIT 1")
        end, at = (last or (_LAST,))[0], 0
        while at < _LAST:
            found = self._next(f"SELECT {key} FROM {self._table} NOT INDEXED WHERE {key} >= {at} ORDER BY {key} LIMIT 1")
            if found is None:
                at = self._beyond(key, at)
                continue
            if not found:
                return
            row = self._next(f"SELECT {self._columns} FROM {self._table} NOT INDEXED WHERE {key} = {found[0]}")
            if row:
                yield row
            at, self.fraction = found[0] + 1, min(1.0, found[0] / max(end, 1))

    def _beyond(self, key: str, at: int) -> int:
        """Return the first key after `at` from which rows can be read again, or `_LAST` if there is none. The row `at` is unreadable."""

        def is_readable(at: int) -> bool:
            return self._next(f"SELECT {key} FROM {self._table} NOT INDEXED WHERE {key} >= {at} ORDER BY {key} LIMIT 1") is not None

        bad, good, step = at, at + 1, 1
        while not is_readable(good):
            step *= 2
            bad, good = good, good + step
            if good >= _LAST:
                return _LAST
        while good - bad > 1:
            middle = (good + bad) // 2
            bad, good = (bad, middle) if is_readable(middle) else (middle, good)
        return good

    def _next(self, query: str) -> tuple[Any, ...] | None:
        """Return the first row of a query: () if there is none, or None if it cannot be read."""
        try:
            return self._db.execute(query).fetchone() or ()
        except (apsw.Error, UnicodeError):
            self.damaged = True
            return None

    def _from_both_ends(self) -> Iterator[tuple[Any, ...]]:
        """Yield rows in order until one is unreadable, then rows from the table's end backwards. A row may be yielded twice."""
        for order in ("", "ORDER BY 1 DESC, 2 DESC"):
            try:
                yield from self._db.execute(f"SELECT {self._columns} FROM {self._table} {order}")
            except (apsw.Error, UnicodeError):
                self.damaged = True
            if not self.damaged:
                return


def _is_state(row: tuple[Any, ...]) -> bool:
    """Return whether the values in a row of `states` have the right types. A row from a damaged page can have any values."""
    values = dict(zip(_TABLES["states"].split(", "), row, strict=True))
    texts = all(isinstance(values[name], str) for name in ("tenant", "model", "fingerprint", "numerics", "origin", "turn", "sha256"))
    numbers = all(isinstance(values[name], int | float) for name in ("position", "created", "used", "pinned", "size"))
    try:
        known = values["status"] in get_args(Status) and isinstance(orjson.loads(values["metadata"]), dict)
    except (ValueError, TypeError):
        return False
    return texts and numbers and known and isinstance(values["id"], str) and ID.fullmatch(values["id"]) is not None


def _of_header(first_bytes: bytes, sha256: str, size: int | None = None) -> tuple[StateRecord, bytes] | None:
    """Return the state that a blob's header describes, and b"" as its token ids, or None if the header is invalid.

    A header has no tenant, metadata and expiry.
    """
    try:
        header = read_header(first_bytes)
    except InvalidRequest:
        return None
    fields = header.metadata
    record = StateRecord(
        id=fields["id"],
        tenant="",
        model=fields["model"],
        fingerprint=fields["fingerprint"],
        numerics=fields["numerics"],
        position=header.position,
        parent=fields.get("parent"),
        origin="continuation" if "parent" in fields else "prompt",
        created=float(fields["created"]),
        used=float(fields["created"]),
        sha256=sha256,
        size=header.size if size is None else size,
    )
    return record, b""


def _open(folder: Path) -> apsw.Connection | None:
    """Return a connection to the old index. If it cannot be opened, return a connection to a copy whose first page is replaced.

    A database's first page says where each table begins. All indexes are created by the same statements, so tables begin at the same
    pages, and the first page of a new, empty index suits the copy. Returns None if the index is missing or has no tables.
    """
    if not (folder / FILE).is_file():
        return None
    for repaired in (False, True):
        try:
            path = _with_first_page(folder) if repaired else folder / FILE
            db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
            if db.execute("SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name IN ('states', 'blobs')").get == 2:
                return db
            db.close()
            return None
        except apsw.Error:
            continue
    return None


def _with_first_page(folder: Path) -> Path:
    copy = folder / "rebuilding" / "old.sqlite3"
    _remove(copy)
    empty = folder / "rebuilding" / "empty.sqlite3"
    _remove(empty)
    db = apsw.Connection(str(empty))
    db.pragma("journal_mode", "wal")
    db.execute(SCHEMA)
    db.close()
    for suffix in ("", "-wal"):
        if (part := folder / (FILE + suffix)).is_file():
            copy.with_name(copy.name + suffix).write_bytes(part.read_bytes())
    with copy.open("r+b") as file:
        file.write(empty.read_bytes()[:_PAGE])
        # SQLite uses the header's number of pages only if two change counters in the header are equal. If they differ, as after this
        # write, SQLite derives the number of pages from the file's size.
        file.seek(92)
        file.write(b"\xff" * 4)
    return copy


def _check_closed(folder: Path) -> None:
    """Raise StoreFailed if a process has the store open. Every such process holds a lock on the file."""
    if not (folder / FILE).is_file():
        return
    try:
        with closing(apsw.Connection(str(folder / FILE))) as db:
            db.pragma("locking_mode", "exclusive")
            db.execute("BEGIN EXCLUSIVE; ROLLBACK")
    except apsw.BusyError:
        raise StoreFailed(f"a process has the store in {folder} open: stop the service first") from None
    except apsw.Error:
        pass  # the database is damaged, which does not matter here


def _take_place(new: Path, folder: Path) -> None:
    """Move the old index to the folder `damaged`, and replace it by the new index."""
    apart = folder / "damaged" / f"index-{time.time_ns()}"
    for suffix in ("", "-wal"):
        if (old := folder / (FILE + suffix)).is_file():
            apart.mkdir(parents=True, exist_ok=True, mode=0o700)
            (apart / old.name).hardlink_to(old)
    for suffix in ("-wal", "-shm"):  # SQLite would apply the old index's log to the new index
        (folder / (FILE + suffix)).unlink(missing_ok=True)
    new.replace(folder / FILE)
    sync(folder)
    for file in new.parent.iterdir():
        file.unlink()
    new.parent.rmdir()


def _remove(database: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
