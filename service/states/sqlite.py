"""The store in one directory: an SQLite database in WAL mode, with large blobs as files beside it. Without a directory, in memory.

A call has returned when its transaction is synced, so it survives kill -9 and power loss. Several processes of one
machine may open the same directory. A blob of at most `INLINE_BYTES` is a row; a larger one is a file named by its hash, written before
the row that refers to it (see `blob_files.py`). A file is removed only under the write lock, after
no row refers to it.

SQLite comes with `apsw`: versions before 3.51.3, such as those of many Python builds, can corrupt a database in WAL mode.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import orjson

from service.errors import StoreFailed
from service.states import sqlite_documents as documents
from service.states.blob_files import BlobFiles
from service.states.record import (
    Ancestor,
    Document,
    Filter,
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
from service.states.refusals import gone, key_reused, name_moved, no_name, no_page, no_state, over_quota
from service.states.sqlite_schema import FIELDS, FROM, SCHEMA, SELECT, VERSION, record_of

INLINE_BYTES = 524_288  # larger rows are slower to write than files: docs/log.md has the measurement
TOMBSTONE_S = 86_400.0  # seconds for which requests for a state that is gone are answered with the reason
KEY_S = 86_400.0  # seconds for which an idempotency key is kept
_BUSY_MS = 10_000  # longest wait for another process's transaction, in milliseconds


class SqliteEngine:
    """The `StateEngine` in SQLite. Use it on one thread."""

    group_size = 64  # calls that share a sync
    failures: tuple[type[Exception], ...] = (apsw.Error, OSError)

    def __init__(self, folder: Path | None, *, vfs: str | None = None, clock: Callable[[], float] = time.time) -> None:
        """Raises StoreFailed if the folder cannot be used."""
        self._clock = clock
        self._touched: dict[str, float] = {}  # state -> time of its last read, not yet written to the database
        self._unused: set[str] = set()  # hashes of the files that may have no row
        self.ended: Counter[Status] = Counter()
        self.damaged_blobs = 0
        try:
            self._files = None if folder is None else BlobFiles(folder)
            self._db = apsw.Connection(":memory:" if folder is None else str(folder / "states.sqlite3"), vfs=vfs)
            self._db.set_busy_timeout(_BUSY_MS)
            # Otherwise power loss can bring back the journal of the change to WAL, which empties the database.
            self._db.pragma("synchronous", "extra")
            self._db.pragma("journal_mode", "wal")
            self._db.pragma("foreign_keys", True)
            with self._transaction():
                version = self._db.pragma("user_version")
                if not version:
                    self._db.execute(SCHEMA)
                    self._db.pragma("user_version", VERSION)
        except (apsw.Error, OSError) as error:
            raise StoreFailed(f"the store of states in {folder} cannot be opened: {_reason(error)}") from error
        if version not in (0, VERSION):
            raise StoreFailed(f"the store in {folder} has version {version}, and this release reads {VERSION}: use another folder")
        if self._files is not None:
            self._unused |= self._files.begin()
            self._remove_unused()

    @contextmanager
    def group(self) -> Iterator[None]:
        """A context whose calls become durable together, with one sync, or not at all. Raises StoreFailed if the commit fails.

        If a call fails in a group inside another group, the changes of the inner group are undone.
        """
        if self._db.in_transaction:
            before = self.ended.copy()
            try:
                with self._db:  # a savepoint
                    yield
            except BaseException:
                self.ended = before
                raise
            return
        try:
            with _failing(), self._transaction():
                yield
        finally:
            self._remove_unused()

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        """A context whose changes are made completely or not at all, in a transaction of its own or within a group."""
        with self.group():
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """`with self._db` would hold the GIL while it waits for another process or for the disk; `execute` releases it."""
        self._db.execute("BEGIN IMMEDIATE")
        before = self.ended.copy()
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self.ended = before
            if self._db.in_transaction:  # some errors have ended it
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
        with self._atomic():
            if key is not None and (made := self.answered(record.tenant, key)) is not None:
                return made
            if self._is_kept(record, blob):
                return self.get(record.tenant, record.id)
            blob_id, sha256, size = self._shared(record) if blob is None else self._kept(record.tenant, blob)
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
            if name is not None:
                self.move(record.tenant, name, record.id)
            if key is not None:
                self._db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?)", (record.tenant, key.key, key.digest, record.id, self._clock()))
            self._make_room(record.tenant, quota, keep=record.id)
            return self.get(record.tenant, record.id)

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
        content = self._content(record.sha256, content)
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
        if wanted.name is not None:
            where, values = [*where, "s.id = (SELECT state FROM names WHERE tenant = ? AND name = ?)"], [*values, tenant, wanted.name]
        for key, value in wanted.metadata:
            where, values = [*where, "s.metadata ->> ? = ?"], [*values, f"$.{orjson.dumps(key).decode()}", value]
        rows = self._db.execute(f"{SELECT} {FROM} WHERE {' AND '.join(where)} ORDER BY s.seq DESC LIMIT ?", (*values, wanted.limit))
        return [record_of(row) for row in rows]

    def change(self, tenant: str, state: str, patch: Patch) -> StateRecord:
        with self._atomic():
            self.get(tenant, state)
            if patch.expires is not None:
                expires = None if math.isinf(patch.expires) else patch.expires
                self._db.execute("UPDATE states SET expires = ? WHERE id = ?", (expires, state))
            if patch.metadata is not None:
                self._db.execute("UPDATE states SET metadata = ? WHERE id = ?", (orjson.dumps(patch.metadata).decode(), state))
            if patch.pinned is not None:
                self._pin(tenant, state, pinned=patch.pinned)
            return self.get(tenant, state)

    def delete(self, tenant: str, state: str) -> None:
        with self._atomic():
            self.get(tenant, state)
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
        row = self._db.execute("SELECT name, state, version FROM names WHERE tenant = ? AND name = ?", (tenant, name)).get
        if row is None:
            raise no_name(name)
        return Name(*row)

    def names(self, tenant: str, state: str) -> list[Name]:
        rows = self._db.execute("SELECT name, state, version FROM names WHERE state = ? AND tenant = ? ORDER BY name", (state, tenant))
        return [Name(*row) for row in rows]

    def move(self, tenant: str, change: NameChange, state: str) -> Name:
        with self._atomic():
            self.get(tenant, state)
            version = self._expected(tenant, change) + 1
            self._db.execute(
                "INSERT INTO names VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET state = excluded.state, version = excluded.version",
                (tenant, change.name, state, version),
            )
            return Name(change.name, state, version)

    def unname(self, tenant: str, change: NameChange) -> None:
        with self._atomic():
            self.name(tenant, change.name)
            self._expected(tenant, change)
            self._db.execute("DELETE FROM names WHERE tenant = ? AND name = ?", (tenant, change.name))

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
        last = 0  # a statement for each, because one over all would keep the WAL from being reset
        with _failing():
            while row := self._db.execute(
                "SELECT id, sha256, content, refs FROM blobs WHERE id > ? ORDER BY id LIMIT 1", (last,)
            ).fetchone():
                last, sha256, content, states = row
                yield StoredBlob(sha256, self._content(sha256, content), states)

    def sweep(self) -> int:
        with self._atomic():
            self._note_use()
            now = self._clock()
            ended = list(self._db.execute("SELECT tenant, id FROM states WHERE status = 'ready' AND expires <= ?", (now,)))
            for tenant, state in ended:
                self._drop(tenant, state, "expired")
            self._db.execute("DELETE FROM keys WHERE created <= ?", (now - KEY_S,))
            alone = "NOT EXISTS (SELECT 1 FROM states c WHERE c.parent = states.id)"
            while self._db.execute(
                f"DELETE FROM states WHERE status != 'ready' AND (used <= ? OR status = 'deleted') AND {alone} RETURNING 1",
                (now - TOMBSTONE_S,),
            ).fetchall():
                pass  # repeat, because their parents may be without children now
            for tenant, size in documents.expire(self._db, now).items():
                self._count(tenant, size=-size)
            return len(ended)

    # Documents -------------------------------------------------------------------------------------------------------------------------

    def write(self, document: Document, expected: int | None, quota: Quota) -> int:
        with self._atomic():
            version, growth = documents.write(self._db, document, expected, self._clock())
            self._count(document.tenant, size=growth)
            if growth > 0:
                self._make_room(document.tenant, quota)
            return version

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

    def _content(self, sha256: str, inline: bytes | None) -> bytes:
        if inline is not None:
            return inline
        assert self._files is not None
        return self._files.read(sha256)

    def _over(self, record: StateRecord) -> bool:
        return record.expires is not None and record.expires <= self._clock()

    def _expected(self, tenant: str, change: NameChange) -> int:
        """Return the name's version, 0 if it is new. Raises NameMoved if the change expects another version."""
        found = self._db.execute("SELECT version FROM names WHERE tenant = ? AND name = ?", (tenant, change.name)).get
        version = 0 if found is None else int(found)
        if change.version is not None and change.version != version:
            raise name_moved(change, version)
        return version

    def _is_kept(self, record: StateRecord, blob: bytes | None) -> bool:
        """Return whether this state, with these bytes, was put before."""
        found = self._db.execute("SELECT parent, sha256 FROM states WHERE id = ? AND tenant = ?", (record.id, record.tenant)).get
        return found is not None and found == (record.parent, found[1] if blob is None else hashlib.sha256(blob).hexdigest())

    def _shared(self, record: StateRecord) -> tuple[int, str, int]:
        """Return the blob of the parent: id, hash and size."""
        parent = self.use(record.tenant, record.parent or "")  # so that it is not evicted before its own forks
        found: tuple[int, str, int] = self._db.execute("SELECT blob, sha256, size FROM states WHERE id = ?", (parent.id,)).get
        return found

    def _kept(self, tenant: str, blob: bytes) -> tuple[int, str, int]:
        """Store the bytes, to which no state refers yet. Returns the blob's id, hash and size."""
        sha256, size = hashlib.sha256(blob).hexdigest(), len(blob)
        inline = size <= INLINE_BYTES or self._files is None
        if not inline and self._files is not None:
            self._unused.add(sha256)  # the file has no row if this transaction fails
            self._files.write(sha256, blob)  # no process removes a file while this transaction holds the write lock
        found = self._db.execute("SELECT id FROM blobs WHERE tenant = ? AND sha256 = ?", (tenant, sha256)).get
        if found is None:
            self._db.execute("INSERT INTO blobs VALUES (NULL, ?, ?, ?, ?, 0, 0)", (tenant, sha256, size, blob if inline else None))
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
            "INSERT INTO tenants VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET states = states + excluded.states, "
            "size = size + excluded.size, pinned_size = pinned_size + excluded.pinned_size",
            (tenant, states, size, pinned_size),
        )

    def _pin(self, tenant: str, state: str, *, pinned: bool) -> None:
        blob_id, now = self._db.execute("SELECT blob, pinned FROM states WHERE id = ?", (state,)).get
        if bool(now) != pinned:
            self._db.execute("UPDATE states SET pinned = ? WHERE id = ?", (pinned, state))
            self._refer(blob_id, 0, 1 if pinned else -1)

    def _drop(self, tenant: str, state: str, status: Status) -> None:
        """Release the blob and the names of a state. Its row stays as long as other states need its ids or requests get the reason."""
        self._pin(tenant, state, pinned=False)
        blob_id = self._db.execute("SELECT blob FROM states WHERE id = ?", (state,)).get
        self._db.execute("UPDATE states SET status = ?, blob = NULL, used = ? WHERE id = ?", (status, self._clock(), state))
        self._db.execute("DELETE FROM names WHERE state = ? AND tenant = ?", (state, tenant))
        self._count(tenant, states=-1)
        self.ended[status] += 1
        self._refer(blob_id, -1)
        self._touched.pop(state, None)

    def _make_room(self, tenant: str, quota: Quota, keep: str | None = None) -> None:
        """Evict the states of the tenant that were used least recently and are not pinned, until it is within its quota."""
        self._note_use()
        usage = self.usage(tenant)
        while usage.states > quota.states or usage.size > quota.size:
            oldest = self._db.execute(
                "SELECT id FROM states WHERE tenant = ? AND status = 'ready' AND NOT pinned AND id IS NOT ? ORDER BY used LIMIT 1",
                (tenant, keep),
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
        """Remove files without a row, after the transaction that may have needed them."""
        if self._files is None or not self._unused or self._db.in_transaction:
            return
        unused, self._unused = self._unused, set()
        try:
            with self._transaction():
                for sha256 in unused:
                    if self._db.execute("SELECT 1 FROM blobs WHERE sha256 = ? LIMIT 1", (sha256,)).get is None:
                        self._files.remove(sha256)
        except (apsw.Error, OSError):
            self._unused |= unused  # the next transaction, or the next start, removes them


@contextmanager
def _failing() -> Iterator[None]:
    """Errors of SQLite and of the disk become StoreFailed."""
    try:
        yield
    except (apsw.Error, OSError) as error:
        raise StoreFailed(f"the store of states failed: {_reason(error)}; send the request again later") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
