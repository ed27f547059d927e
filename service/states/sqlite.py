"""The store in one directory: an SQLite database in WAL mode, and a file for each large blob. Without a directory, the store is in memory.

A call returns only after its transaction is synced, so its changes survive kill -9 and power loss. Several processes of one machine may
open the same directory. A blob of at most `INLINE_BYTES` bytes is stored in a row. A larger blob is a file named by its hash, which is
written before the row that refers to it; see `blob_files.py`. A file is removed only under the write lock, when no row refers to it.

SQLite comes with `apsw`: versions before 3.51.3, such as those of many Python builds, can corrupt a database in WAL mode.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import orjson

from service.errors import QuotaExceeded, StoreFailed
from service.states.backend import Changes, KeptKey, Key, Meta, Sharing, Tenant, Trouble
from service.states.blob_files import BlobFiles
from service.states.engine import SWEPT, StateEngine
from service.states.record import Ancestor, Document, Fork, Name, NameChange, Quota, StateRecord, StoredBlob, Usage
from service.states.sqlite_disk import StoreDisk
from service.states.sqlite_schema import (
    FIELDS,
    FILE,
    FROM,
    NEWEST,
    OLDEST,
    ROWS,
    SCHEMA,
    SELECT,
    STATES,
    TIMED,
    UPGRADES,
    VERSION,
    record_of,
)

INLINE_BYTES = 524_288  # larger rows are slower to write than files: docs/decisions.md has the measurement
_SWEPT_SPARE = 16  # as SWEPT, on a full disk
_BUSY_MS = 10_000  # longest wait for another process's transaction, in milliseconds
_MOST_SEQ = 2**62
_CHANGING = "used, expires, pinned, metadata, status"  # columns of a state that may change
_FIXED = ", ".join(field for field in FIELDS.split(", ") if field not in _CHANGING.split(", "))
_BLOB = "(SELECT id FROM blobs WHERE tenant = ? AND sha256 = ?)"


class SqliteEngine(StateEngine):
    """The backend in SQLite. Use it on one thread."""

    group_size = 64  # limit on the calls that share one sync
    failures = (apsw.Error, OSError)

    def __init__(self, folder: Path | None, *, vfs: str | None = None, clock: Callable[[], float] = time.time) -> None:
        """Raises StoreFailed if the folder cannot be used."""
        super().__init__(clock)
        self._touched: dict[str, float] = {}  # state -> time of its last read, not yet written to the database
        self._unused: set[str] = set()  # hashes of blob files to which perhaps no row refers
        self._disk = StoreDisk(folder)
        with self._disk.failing(f"the store of states in {folder} cannot be opened", ""):
            self._files = None if folder is None else BlobFiles(folder)
            self._db = apsw.Connection(":memory:" if folder is None else str(folder / FILE), vfs=vfs)
            self._disk.begin(self._db)
            self._db.set_busy_timeout(_BUSY_MS)
            # Without "extra", power loss can restore the journal that was used to change to WAL, and this journal empties the database.
            self._db.pragma("synchronous", "extra")
            self._db.pragma("journal_mode", "wal")
            self._db.pragma("foreign_keys", True)
            with self._transaction():
                version = self._db.pragma("user_version")
                lost = not version and self._files is not None and next(self._files.all(), None) is not None
                if version < VERSION and not lost:
                    self._db.execute(SCHEMA if not version else "".join(UPGRADES[version - 1 :]))
                    self._db.pragma("user_version", VERSION)
        if version > VERSION:
            raise StoreFailed(f"the store in {folder} has version {version}, and this release reads {VERSION}: use another folder")
        if lost:
            raise StoreFailed(
                f"the store in {folder} has files of blobs and no index: copy {FILE} of the newest backup into it "
                f"(`attnserve states backup` makes one); without the folder {folder}/blobs the store is empty"
            )
        self._disk.opened()
        if self._files is not None:
            self._unused |= self._files.begin()
            self._remove_unused()

    def trouble(self) -> Trouble | None:
        return self._disk.trouble()

    @contextmanager
    def spare(self) -> Iterator[None]:
        """Return a group that may use the store's reserve, for one call that found the disk full. What needs room raises StoreFull."""
        self._disk.spare = True
        try:
            with self.group():
                yield
        finally:
            self._disk.spare = False
            self._disk.restore(self._db)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Return a context whose calls become durable together, with one sync, or not at all. Raises StoreFailed if the commit fails.

        If a call fails in a group inside another group, the changes of the inner group are undone.
        """
        if self._db.in_transaction:
            with self._undone_if_it_fails(), self._db:  # inside a transaction, apsw begins a savepoint
                yield
            return
        try:
            with self._disk.failing(), self._transaction():
                yield
        finally:
            self._remove_unused()

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        """Return a context whose failure restores what this object counts and remembers of the changes."""
        ended, touched = self.ended.copy(), self._touched.copy()
        try:
            yield
        except BaseException:
            self.ended, self._touched = ended, touched | self._touched
            raise

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Return a context that is one transaction. It uses `execute` and not `with self._db`, which would hold the GIL while it waits for
        another process or the disk."""
        self._db.execute("BEGIN IMMEDIATE")
        changes = self._db.total_changes()
        try:
            with self._undone_if_it_fails():
                self._disk.check()
                if self._disk.spare:
                    self._disk.release()
                yield
                self._disk.allocate(self._db)
                self._db.execute("COMMIT")
                self._disk.check()
            if self._db.total_changes() != changes and not self._disk.spare:
                self._disk.full = False
        except BaseException:
            if self._db.in_transaction:  # False after errors that have ended the transaction
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()

    # Full disks ------------------------------------------------------------------------------------------------------------------------

    def _add(self, forks: Sequence[Fork], quota: Quota, blob: bytes | None, ids: bytes, name: NameChange | None) -> list[StateRecord]:
        if self._disk.spare:  # room is made first, and stays made for another try if there is still too little
            with suppress(QuotaExceeded):
                less = Quota(quota.states - 1, quota.size - len(blob or b""))
                self._change(forks[0].record.tenant, lambda rows: rows.make_room(less))
        return super()._add(forks, quota, blob, ids, name)

    def sweep(self) -> bool:
        if not self._disk.spare:
            self._disk.reserve()
        with self.group():
            self._note_use()
            return self._sweep(_SWEPT_SPARE if self._disk.spare else SWEPT)

    # Reads -----------------------------------------------------------------------------------------------------------------------------

    def rows(self, tenant: str, keys: Sequence[Key]) -> list[Any]:
        states = dict[str, StateRecord]()
        if len(ids := [key[1] for key in keys if key[0] == "state"]) > 1:  # at once, since a statement for each would take twice the time
            states = {found.id: found for found in map(record_of, self._db.execute(STATES, (orjson.dumps(ids).decode(), tenant)))}
        return [
            states.get(key[0])
            if table == "state" and len(ids) > 1
            else _row(table, self._db.execute(ROWS[table], (tenant, *key)).fetchone())
            for table, *key in keys
        ]

    def newest(self, tenant: str, index: str, below: float, limit: int) -> list[str]:
        index, *of = index.split(":", 1)
        return [id for (id,) in self._db.execute(NEWEST[index], (tenant, *of, min(below, _MOST_SEQ), limit))]

    def oldest(self, tenant: str, index: str, skip: int, limit: int) -> list[str]:
        self._note_use()
        return [id for (id,) in self._db.execute(f"{OLDEST[index]} LIMIT ? OFFSET ?", (tenant, limit, skip))]

    def sharing(self, tenant: str, sha256: str) -> list[str]:
        rows = self._db.execute(f"SELECT s.id {FROM} WHERE b.tenant = ? AND b.sha256 = ?", (tenant, sha256))
        return [id for (id,) in rows]

    def timed(self, index: str, until: float, limit: int) -> list[tuple[str, str]]:
        index, *kind = index.split(":", 1)
        now = [self._clock()] if kind else []  # documents that are due and have expired are left out
        rows: list[Any] = self._db.execute(TIMED[index], (*kind, until, *now, limit)).fetchall()
        return rows

    def line(self, tenant: str, state: str, most: int) -> list[Ancestor]:
        rows = self._db.execute(
            "WITH RECURSIVE line(id, depth) AS (SELECT ?, 0 UNION ALL SELECT p.parent, depth + 1 FROM line JOIN states p ON p.id = line.id "
            f"WHERE p.parent IS NOT NULL LIMIT ?) {SELECT}, s.ids {FROM} JOIN line ON line.id = s.id WHERE s.tenant = ? ORDER BY depth",
            (state, most, tenant),
        )
        return [Ancestor(record_of(row[:-1]), row[-1]) for row in rows]

    def content(self, tenant: str, record: StateRecord) -> bytes:
        found = self._db.execute("SELECT content FROM blobs WHERE tenant = ? AND sha256 = ?", (tenant, record.sha256)).fetchone()
        return b"" if found is None else self._content(record.sha256, record.size, found[0])

    def totals(self) -> Usage:
        return Usage(
            *self._db.execute("SELECT coalesce(sum(states), 0), coalesce(sum(size), 0), coalesce(sum(pinned_size), 0) FROM tenants").get
        )

    def blobs(self) -> Iterator[StoredBlob]:
        last = 0  # one statement for each blob: a statement for all would prevent the WAL's reset
        with self._disk.failing():
            while row := self._db.execute(
                "SELECT id, sha256, size, content, refs FROM blobs WHERE id > ? ORDER BY id LIMIT 1", (last,)
            ).fetchone():
                last, sha256, size, content, states = row
                yield StoredBlob(sha256, self._content(sha256, size, content), states)

    def _content(self, sha256: str, size: int, inline: bytes | None) -> bytes:
        if inline is not None:
            return inline
        assert self._files is not None
        return self._files.read(sha256, size)

    # Changes ---------------------------------------------------------------------------------------------------------------------------

    def touch(self, tenant: str, state: str, now: float) -> None:
        self._touched[state] = now

    def _note_use(self) -> None:
        touched, self._touched = self._touched, {}
        rows = [(at, state) for state, at in touched.items()]
        self._db.executemany("UPDATE states SET used = max(used, ?) WHERE id = ? AND status = 'ready'", rows)

    def commit(self, changes: Changes) -> bool:
        """Apply the changes. The version always holds, because the transaction has the write lock since before it read the rows."""
        blobs = {key[1]: row for key, row in changes.after.items() if key[0] == "sharing"}
        for sha256, sharing in blobs.items():  # before the states, which refer to them
            self._write_blob(changes, sha256, sharing)
        for (table, *key), row in changes.after.items():
            match table:
                case "state":
                    self._write_state(changes, key[0], row)
                case "document":
                    self._write_document(changes.tenant, key[0], key[1], row)
                case "name":
                    self._replace("names", "name", changes.tenant, key[0], row and row[1:])
                case "key":
                    self._replace("keys", "key", changes.tenant, key[0], row)
                case "tenant":
                    counts = row[:8]
                    self._db.execute(f"INSERT OR REPLACE INTO tenants VALUES (?{', ?' * len(counts)})", (changes.tenant, *counts))
        for sha256 in (sha256 for sha256, sharing in blobs.items() if not sharing.states):
            where = "tenant = ? AND sha256 = ? RETURNING content IS NULL"
            if self._db.execute(f"DELETE FROM blobs WHERE {where}", (changes.tenant, sha256)).get:
                self._unused.add(sha256)
        if self._files is not None:
            for sha256 in changes.apart:
                self._files.set_apart(sha256)
        return True

    def _write_blob(self, changes: Changes, sha256: str, sharing: Sharing) -> None:
        """Write the number of states that share a blob, and its bytes if a new state came with them: its file may be missing."""
        where, blob = (changes.tenant, sha256), changes.content.get(sha256)
        inline = self._files is None or len(blob or b"") <= INLINE_BYTES
        if blob is not None:
            self._disk.check_room(self._db, len(blob), in_file=not inline)
            if not inline and self._files is not None:
                self._unused.add(sha256)  # if this transaction fails, the file has no row and is removed later
                self._files.write(sha256, blob)  # no process removes a file while this transaction holds the write lock
        if blob is None or changes.before["sharing", sha256].states:
            self._db.execute("UPDATE blobs SET refs = ?, pins = ? WHERE tenant = ? AND sha256 = ?", (*sharing, *where))
        else:
            self._db.execute("INSERT INTO blobs VALUES (NULL, ?, ?, ?, ?, ?, ?)", (*where, len(blob), blob if inline else None, *sharing))

    def _write_state(self, changes: Changes, id: str, record: StateRecord | None) -> None:
        if record is None:
            self._db.execute("DELETE FROM states WHERE id = ?", (id,))
            return
        blob = (changes.tenant, record.sha256 if record.status == "ready" else "")
        changing = (record.used, record.expires, record.pinned, orjson.dumps(record.metadata).decode(), record.status)
        if changes.before["state", id] is None:
            fixed = [getattr(record, field) for field in _FIXED.split(", ")]
            values = (*fixed, *changing, changes.ids[id], *blob)
            self._db.execute(f"INSERT INTO states({_FIXED}, {_CHANGING}, ids, blob) VALUES ({'?, ' * (len(values) - 2)}{_BLOB})", values)
            return
        self._db.execute(f"UPDATE states SET ({_CHANGING}, blob) = ({'?, ' * len(changing)}{_BLOB}) WHERE id = ?", (*changing, *blob, id))
        if id in changes.ids:
            self._db.execute("UPDATE states SET ids = ? WHERE id = ?", (changes.ids[id], id))
        if record.status != "ready":
            self._touched.pop(id, None)

    def _write_document(self, tenant: str, kind: str, id: str, row: Document | None) -> None:
        if row is None or not row.seq:  # one that follows an expired one is a new one, also in its place in pages
            self._db.execute("DELETE FROM documents WHERE tenant = ? AND kind = ? AND id = ?", (tenant, kind, id))
        if row is not None:
            self._disk.check_room(self._db, len(row.body))
            self._db.execute(
                "INSERT INTO documents(tenant, kind, id, body, version, due, expires) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
                "SET body = excluded.body, version = excluded.version, due = excluded.due, expires = excluded.expires",
                (tenant, kind, id, row.body, row.version, row.due, row.expires),
            )

    def _replace(self, table: str, key: str, tenant: str, id: str, row: Sequence[Any] | None) -> None:
        """Write or delete a row of the names or the keys."""
        if row is None:
            self._db.execute(f"DELETE FROM {table} WHERE tenant = ? AND {key} = ?", (tenant, id))
        else:
            self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, {', '.join('?' * len(row))})", (tenant, id, *row))

    def _remove_unused(self) -> None:
        """Remove files of blobs without a row. Does nothing inside a transaction, which may still add a row."""
        if self._files is None or not self._unused or self._db.in_transaction:
            return
        unused, self._unused = self._unused, set()
        try:
            with self._transaction():
                for sha256 in unused:
                    if self._db.execute("SELECT 1 FROM blobs WHERE sha256 = ? LIMIT 1", (sha256,)).get is None:
                        self._files.remove(sha256)
        except (apsw.Error, OSError, StoreFailed):
            self._unused |= unused  # the next transaction, or the next start, removes these files


def _row(table: str, row: tuple[Any, ...] | None) -> Any:
    """Return a row of `backend.py` from the columns that its statement in `ROWS` returns."""
    if row is None:
        return {"tenant": Tenant(), "sharing": Sharing()}.get(table)
    match table:
        case "state":
            return record_of(row)
        case "named":
            return orjson.loads(row[0])
        case "body" | "kin":
            return row[0]
    kinds: dict[str, Callable[..., Any]] = {"tenant": Tenant, "sharing": Sharing, "name": Name, "key": KeptKey, "document": Meta}
    return kinds[table](*row)
