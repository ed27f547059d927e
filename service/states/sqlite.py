"""The store in one directory: an SQLite database in WAL mode, and a file for each large blob. Without a directory, the store is in memory.

A call returns only after its transaction is synced, so its changes survive kill -9 and power loss. Several processes of one machine may
open the same directory. A blob of at most `INLINE_BYTES` bytes is stored in a row. A larger blob is a file named by its hash, which is
written before the row that refers to it; see `blob_files.py`. A file is removed only under the write lock, when no row refers to it.

SQLite comes with `apsw`: versions before 3.51.3, such as those of many Python builds, can corrupt a database in WAL mode.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import orjson

from service.errors import QuotaExceeded, StoreFailed
from service.states import sqlite_documents as documents
from service.states import sqlite_names as names
from service.states.blob_files import BlobFiles
from service.states.engine import SWEPT, Trouble
from service.states.record import (
    Ancestor,
    Document,
    Filter,
    Fork,
    IdempotencyKey,
    Name,
    NameChange,
    Patch,
    Quota,
    StateRecord,
    Status,
    StoredBlob,
    Usage,
)
from service.states.refusals import gone, key_reused, no_page, no_state, over_quota
from service.states.sqlite_disk import StoreDisk
from service.states.sqlite_schema import FIELDS, FILE, FROM, FROM_VERSION_1, SCHEMA, SELECT, VERSION, record_of

INLINE_BYTES = 524_288  # larger rows are slower to write than files: docs/decisions.md has the measurement
TOMBSTONE_S = 86_400.0  # seconds for which requests for a state that is gone are answered with the reason
KEY_S = 86_400.0  # seconds for which an idempotency key is kept
_AT_ONCE, _WAITS = -math.inf, math.inf  # `used` of a state that is gone: the next sweep deletes its row; the row stays for its children
_SWEPT_SPARE = 16  # as SWEPT, on a full disk
_BUSY_MS = 10_000  # longest wait for another process's transaction, in milliseconds


class SqliteEngine:
    """The `StateEngine` in SQLite. Use it on one thread."""

    group_size = 64  # limit on the calls that share one sync
    failures: tuple[type[Exception], ...] = (apsw.Error, OSError)

    def __init__(self, folder: Path | None, *, vfs: str | None = None, clock: Callable[[], float] = time.time) -> None:
        """Raises StoreFailed if the folder cannot be used."""
        self._clock = clock
        self._touched: dict[str, float] = {}  # state -> time of its last read, not yet written to the database
        self._unused: set[str] = set()  # hashes of blob files to which perhaps no row refers
        self.ended: Counter[Status] = Counter()
        self.damaged_blobs = 0
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
                if version in (0, 1) and not lost:
                    self._db.execute(FROM_VERSION_1 if version else SCHEMA)
                    self._db.pragma("user_version", VERSION)
        if version not in (0, 1, VERSION):
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
            before = self.ended.copy()
            try:
                with self._db:  # inside a transaction, apsw begins a savepoint
                    yield
            except BaseException:
                self.ended = before
                raise
            return
        try:
            with self._disk.failing(), self._transaction():
                yield
        finally:
            self._remove_unused()

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        """Return a context whose changes are made completely or not at all. It is a transaction, or part of the transaction of a group."""
        with self.group():
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Return a context that is one transaction. It uses `execute` and not `with self._db`, which would hold the GIL while it waits for
        another process or the disk."""
        self._db.execute("BEGIN IMMEDIATE")
        before, changes = self.ended.copy(), self._db.total_changes()
        try:
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
            self.ended = before
            if self._db.in_transaction:  # False after errors that have ended the transaction
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()

    # States ----------------------------------------------------------------------------------------------------------------------------

    def put(
        self,
        record: StateRecord,
        blob: bytes | None,
        *,
        ids: bytes = b"",
        quota: Quota,
        name: NameChange | None = None,
        key: IdempotencyKey | None = None,
    ) -> StateRecord:
        if self._disk.spare:  # room is made first, and stays made for another try if there is still too little
            with suppress(QuotaExceeded), self._atomic():
                self._make_room(record.tenant, Quota(quota.states - 1, quota.size - len(blob or b"")))
        with self._atomic():
            if (made := self._insert(record, blob, ids, key)) is not None:
                return made
            if name is not None:
                names.move(self._db, record.tenant, name, record.id)
            self._make_room(record.tenant, quota, [record.id])
            return self.get(record.tenant, record.id)

    def fork(self, forks: Sequence[Fork], quota: Quota) -> list[StateRecord]:
        with self._atomic():
            made = [self._insert(record, None, b"", key) for record, key in forks]
            self._make_room(forks[0].record.tenant, quota, [record.id for record, _ in forks])
            return [earlier or self.get(record.tenant, record.id) for earlier, (record, _) in zip(made, forks, strict=True)]

    def get(self, tenant: str, state: str) -> StateRecord:
        row = self._db.execute(f"{SELECT} {FROM} WHERE s.id = ? AND s.tenant = ?", (state, tenant)).get
        record = None if row is None else record_of(row)
        if record is None or record.status == "deleted":
            raise no_state(state)
        if record.status != "ready" or self._over(record):
            raise gone(state, "expired" if record.status == "ready" else record.status)
        return record

    def use(self, tenant: str, state: str) -> StateRecord:
        record = self.get(tenant, state)
        self._touched[state] = self._clock()
        return record

    def blob(self, tenant: str, state: str) -> bytes:
        record = self.use(tenant, state)
        blob_id, content = self._db.execute("SELECT b.id, b.content " + FROM + " WHERE s.id = ?", (state,)).get
        content = self._content(record.sha256, record.size, content)
        if hashlib.sha256(content).hexdigest() != record.sha256:
            self._quarantine(blob_id, record)
            raise gone(state, "damaged")
        return content

    def page(self, tenant: str, wanted: Filter) -> list[StateRecord]:
        where, values = ["s.tenant = ?", "s.status = 'ready'", "(s.expires IS NULL OR s.expires > ?)"], [tenant, self._clock()]
        if wanted.after is not None:
            seq = self._db.execute("SELECT seq FROM states WHERE id = ? AND tenant = ?", (wanted.after, tenant)).get
            if seq is None:
                raise no_page("state", wanted.after)
            where, values = [*where, "s.seq < ?"], [*values, seq]
        if wanted.model is not None:
            where, values = [*where, "s.model = ?"], [*values, wanted.model]
        if wanted.origin is not None:
            where, values = [*where, "s.origin = ?"], [*values, wanted.origin]
        if wanted.name is not None:
            where, values = [*where, "s.id = (SELECT state FROM names WHERE tenant = ? AND name = ?)"], [*values, tenant, wanted.name]
        for key, value in wanted.metadata:
            where, values = [*where, "s.metadata ->> ? = ?"], [*values, f"$.{orjson.dumps(key).decode()}", value]
        rows = self._db.execute(f"{SELECT} {FROM} WHERE {' AND '.join(where)} ORDER BY s.seq DESC LIMIT ?", (*values, wanted.limit))
        return [record_of(row) for row in rows]

    def change(
        self, tenant: str, state: str, patch: Patch, *, name: NameChange | None = None, guard: NameChange | None = None
    ) -> StateRecord:
        with self._atomic():
            self.get(tenant, state)
            if guard is not None:
                names.check(self._db, tenant, guard)
            if name is not None:
                names.move(self._db, tenant, name, state)
            if patch.expires is not None:
                expires = None if math.isinf(patch.expires) else patch.expires
                self._db.execute("UPDATE states SET expires = ? WHERE id = ?", (expires, state))
            if patch.metadata is not None:
                self._db.execute("UPDATE states SET metadata = ? WHERE id = ?", (orjson.dumps(patch.metadata).decode(), state))
            if patch.pinned is not None:
                self._pin(tenant, state, pinned=patch.pinned)
            return self.get(tenant, state)

    def delete(self, tenant: str, state: str, guard: NameChange | None = None) -> None:
        with self._atomic():
            self.get(tenant, state)
            if guard is not None:
                names.check(self._db, tenant, guard)
            self._drop(tenant, state, "deleted")

    def lineage(self, tenant: str, state: str, most: int | None = None) -> list[Ancestor]:
        self.get(tenant, state)
        rows = self._db.execute(
            "WITH RECURSIVE line(id, depth) AS (SELECT ?, 0 UNION ALL SELECT p.parent, depth + 1 FROM line JOIN states p ON p.id = line.id "
            f"WHERE p.parent IS NOT NULL LIMIT ?) {SELECT}, s.ids {FROM} JOIN line ON line.id = s.id WHERE s.tenant = ? ORDER BY depth",
            (state, -1 if most is None else most, tenant),
        )
        return [Ancestor(record_of(row[:-1]), row[-1]) for row in rows]

    def children(self, tenant: str, state: str, limit: int) -> list[StateRecord]:
        self.get(tenant, state)
        where = "WHERE s.parent = ? AND s.status = 'ready' AND s.tenant = ? ORDER BY s.seq DESC LIMIT ?"
        return [record_of(row) for row in self._db.execute(f"{SELECT} {FROM} {where}", (state, tenant, limit))]

    # Names and idempotency keys --------------------------------------------------------------------------------------------------------

    def name(self, tenant: str, name: str) -> Name:
        return names.find(self._db, tenant, name)

    def names(self, tenant: str, state: str) -> list[Name]:
        return names.of_state(self._db, tenant, state)

    def move(self, tenant: str, change: NameChange, state: str) -> Name:
        with self._atomic():
            self.get(tenant, state)
            return names.move(self._db, tenant, change, state)

    def unname(self, tenant: str, change: NameChange) -> None:
        with self._atomic():
            names.find(self._db, tenant, change.name)
            names.check(self._db, tenant, change)
            names.remove(self._db, tenant, change.name)

    def answered(self, tenant: str, key: IdempotencyKey) -> StateRecord | None:
        row = self._db.execute(
            "SELECT digest, state FROM keys WHERE tenant = ? AND key = ? AND created > ?", (tenant, key.key, self._clock() - KEY_S)
        ).get
        if row is None:
            return None
        digest, state = row
        if digest != key.digest:
            raise key_reused(key)
        return self.get(tenant, state)

    def usage(self, tenant: str) -> Usage:
        row = self._db.execute("SELECT states, size, pinned_size FROM tenants WHERE tenant = ?", (tenant,)).get
        return Usage() if row is None else Usage(*row)

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

    def sweep(self) -> bool:
        if not self._disk.spare:
            self._disk.reserve()
        with self._atomic():
            self._note_use()
            now, left = self._clock(), _SWEPT_SPARE if self._disk.spare else SWEPT
            over = "SELECT tenant, id FROM states WHERE status = 'ready' AND expires <= ? LIMIT ?"
            ended: list[Any] = self._db.execute(over, (now, left)).fetchall()
            for tenant, state in ended:
                self._drop(tenant, state, "expired")
            left -= len(ended)
            old = "SELECT tenant, key FROM keys WHERE created <= ? LIMIT ?"
            left -= len(self._db.execute(f"DELETE FROM keys WHERE (tenant, key) IN ({old}) RETURNING 1", (now - KEY_S, left)).fetchall())
            expired = documents.expire(self._db, now, left)
            for tenant, size in expired:
                self._count(tenant, size=-size)
            left -= len(expired)
            while left and (gone := self._gone(now - TOMBSTONE_S, left)):  # repeated, because a deleted row's parent may be next
                for seq, state, parent in gone:
                    self._forget(seq, state, parent)
                left -= len(gone)
            return not left

    # Documents -------------------------------------------------------------------------------------------------------------------------

    def write(self, document: Document, expected: int | None, quota: Quota) -> int:
        with self._atomic():
            self._disk.check_room(self._db, len(document.body))
            version, growth = documents.write(self._db, document, expected, self._clock())
            self._count(document.tenant, size=growth)
            if growth > 0:
                self._make_room(document.tenant, quota)
            return version

    def write_all(self, documents: Sequence[tuple[Document, int | None]], quota: Quota) -> list[int]:
        with self._atomic():
            return [self.write(document, expected, quota) for document, expected in documents]

    def read(self, tenant: str, kind: str, id: str) -> Document:
        return documents.read(self._db, tenant, kind, id, self._clock())

    def erase(self, tenant: str, kind: str, id: str, expected: int | None) -> None:
        with self._atomic():
            self._count(tenant, size=-documents.erase(self._db, tenant, kind, id, expected, self._clock()))

    def documents(self, tenant: str, kind: str, after: str | None, limit: int) -> list[Document]:
        return documents.page(self._db, tenant, kind, after, limit, self._clock())

    def due(self, kind: str, now: float, limit: int) -> list[Document]:
        return documents.due(self._db, kind, now, limit, self._clock())

    # Inside a transaction --------------------------------------------------------------------------------------------------------------

    def _content(self, sha256: str, size: int, inline: bytes | None) -> bytes:
        if inline is not None:
            return inline
        assert self._files is not None
        return self._files.read(sha256, size)

    def _over(self, record: StateRecord) -> bool:
        return record.expires is not None and record.expires <= self._clock()

    def _insert(self, record: StateRecord, blob: bytes | None, ids: bytes, key: IdempotencyKey | None) -> StateRecord | None:
        """Write a new state, and return None. If a state with this key or id was stored before, return that state and write nothing."""
        if key is not None and (made := self.answered(record.tenant, key)) is not None:
            return made
        if self._is_kept(record, blob):
            return self.get(record.tenant, record.id)
        blob_id, sha256, size = self._shared(record) if blob is None else self._kept(record, blob, ids)
        row = (
            *(record.id, record.tenant, record.model, record.fingerprint, record.numerics, record.position, record.parent),
            *(record.origin, record.created, record.used, record.expires, False, orjson.dumps(record.metadata).decode()),
            *(record.turn, sha256, size, "ready", ids, blob_id),
        )
        self._db.execute(f"INSERT INTO states({FIELDS}, ids, blob) VALUES ({', '.join('?' * len(row))})", row)
        self._count(record.tenant, states=1)
        self._refer(blob_id, 1)
        if record.pinned:
            self._pin(record.tenant, record.id, pinned=True)
        if key is not None:
            self._db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?)", (record.tenant, key.key, key.digest, record.id, self._clock()))
        return None

    def _is_kept(self, record: StateRecord, blob: bytes | None) -> bool:
        """Return whether a state with this id, parent and bytes was stored before."""
        found = self._db.execute("SELECT parent, sha256 FROM states WHERE id = ? AND tenant = ?", (record.id, record.tenant)).get
        return found is not None and found == (record.parent, found[1] if blob is None else hashlib.sha256(blob).hexdigest())

    def _shared(self, record: StateRecord) -> tuple[int, str, int]:
        """Return the id, the hash and the size in bytes of the parent's blob."""
        parent = self.use(record.tenant, record.parent or "")  # `use`, so that the parent is not evicted before its forks
        found: tuple[int, str, int] = self._db.execute("SELECT blob, sha256, size FROM states WHERE id = ?", (parent.id,)).get
        return found

    def _kept(self, record: StateRecord, blob: bytes, ids: bytes) -> tuple[int, str, int]:
        """Store the bytes of a new state, and return the id, the hash and the size in bytes of their blob."""
        sha256, size = hashlib.sha256(blob).hexdigest(), len(blob)
        inline = size <= INLINE_BYTES or self._files is None
        self._disk.check_room(self._db, size, in_file=not inline)
        if not inline and self._files is not None:
            self._unused.add(sha256)  # if this transaction fails, the file has no row and is removed later
            self._files.write(sha256, blob)  # no process removes a file while this transaction holds the write lock
        found = self._db.execute("SELECT id FROM blobs WHERE tenant = ? AND sha256 = ?", (record.tenant, sha256)).get
        if found is None:
            self._db.execute("INSERT INTO blobs VALUES (NULL, ?, ?, ?, ?, 0, 0)", (record.tenant, sha256, size, blob if inline else None))
            found = self._db.last_insert_rowid()
        return int(found), sha256, size

    def _refer(self, blob_id: int, by: int, pins: int = 0) -> None:
        """Change the number of states that refer to a blob, and its tenant's usage accordingly."""
        tenant, sha256, size, content, refs, pinned = self._db.execute(
            "SELECT tenant, sha256, size, content IS NULL, refs, pins FROM blobs WHERE id = ?", (blob_id,)
        ).get
        kept = size * ((refs + by > 0) - (refs > 0))
        held = size * ((pinned + pins > 0) - (pinned > 0))
        self._count(tenant, size=kept, pinned_size=held)
        self._db.execute("UPDATE blobs SET refs = refs + ?, pins = pins + ? WHERE id = ?", (by, pins, blob_id))
        if refs + by == 0:
            self._db.execute("DELETE FROM blobs WHERE id = ?", (blob_id,))
            if content:
                self._unused.add(sha256)

    def _count(self, tenant: str, *, states: int = 0, size: int = 0, pinned_size: int = 0) -> None:
        self._db.execute(
            "INSERT INTO tenants(tenant, states, size, pinned_size) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET states = states + excluded.states, "
            "size = size + excluded.size, pinned_size = pinned_size + excluded.pinned_size",
            (tenant, states, size, pinned_size),
        )

    def _pin(self, tenant: str, state: str, *, pinned: bool) -> None:
        blob_id, now = self._db.execute("SELECT blob, pinned FROM states WHERE id = ?", (state,)).get
        if bool(now) != pinned:
            self._db.execute("UPDATE states SET pinned = ? WHERE id = ?", (pinned, state))
            self._refer(blob_id, 0, 1 if pinned else -1)

    def _drop(self, tenant: str, state: str, status: Status) -> None:
        """End a state: release its blob and names, and set its status. Its row stays while it has children or requests get the reason."""
        self._pin(tenant, state, pinned=False)
        blob_id = self._db.execute("SELECT blob FROM states WHERE id = ?", (state,)).get
        used = _AT_ONCE if status == "deleted" else self._clock()  # nobody gets the reason of a deletion
        self._db.execute("UPDATE states SET status = ?, blob = NULL, used = ? WHERE id = ?", (status, used, state))
        for name in names.of_state(self._db, tenant, state):
            names.remove(self._db, tenant, name.name)
        self._count(tenant, states=-1)
        self.ended[status] += 1
        self._refer(blob_id, -1)
        self._touched.pop(state, None)

    def _gone(self, until: float, most: int) -> list[Any]:
        """Return number, id and parent of at most `most` states that are gone, whose rows may be deleted unless they have children."""
        query = "SELECT seq, id, parent FROM states WHERE status != 'ready' AND used <= ? ORDER BY used LIMIT ?"
        return self._db.execute(query, (until, most)).fetchall()

    def _forget(self, seq: int, state: str, parent: str | None) -> None:
        """Delete the row of a state that is gone. If it has children, it stays until the last of them is deleted."""
        if self._db.execute("SELECT 1 FROM states WHERE parent = ? LIMIT 1", (state,)).get is not None:
            self._db.execute("UPDATE states SET used = ? WHERE seq = ?", (_WAITS, seq))
            return
        self._db.execute("DELETE FROM states WHERE seq = ?", (seq,))
        self._db.execute("UPDATE states SET used = ? WHERE id = ? AND status != 'ready' AND used = ?", (_AT_ONCE, parent, _WAITS))

    def _make_room(self, tenant: str, quota: Quota, keep: Sequence[str] = ()) -> None:
        """Evict the states of the tenant that were used least recently, are not pinned and not in `keep`, until it is within its quota."""
        self._note_use()
        usage, kept = self.usage(tenant), orjson.dumps(keep).decode()
        while usage.states > quota.states or usage.size > quota.size:
            oldest = self._db.execute(
                "SELECT id FROM states WHERE tenant = ? AND status = 'ready' AND NOT pinned AND id NOT IN (SELECT value FROM json_each(?)) "
                "ORDER BY used LIMIT 1",
                (tenant, kept),
            ).get
            if oldest is None:
                raise over_quota(usage, quota)
            self._drop(tenant, oldest, "evicted")
            usage = self.usage(tenant)

    def _note_use(self) -> None:
        touched, self._touched = self._touched, {}
        self._db.executemany("UPDATE states SET used = ? WHERE id = ? AND status = 'ready'", [(at, state) for state, at in touched.items()])

    def _quarantine(self, blob_id: int, record: StateRecord) -> None:
        """Mark all states that share damaged bytes as gone, and keep the bytes in a file for analysis."""
        with self._atomic():
            sharing = list(self._db.execute("SELECT tenant, id FROM states WHERE blob = ?", (blob_id,)))
            for tenant, state in sharing:
                self._drop(tenant, state, "damaged")
            self.damaged_blobs += 1
            if self._files is not None:
                self._files.set_apart(record.sha256)

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
