"""Stores documents in SQLite. Each document is a row with a version, the time at which it is due, and the time at which it expires.

The functions are called in a transaction of `SqliteEngine`, which counts the bytes. An expired document counts as missing.
"""

from collections import Counter
from typing import Any

import apsw

from service.states.record import Document
from service.states.refusals import document_moved, no_document, no_page

SCHEMA = """
CREATE TABLE documents(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL,
    version INTEGER NOT NULL, due REAL, expires REAL, UNIQUE(tenant, kind, id)
);
CREATE INDEX documents_by_kind ON documents(tenant, kind, seq);
CREATE INDEX documents_by_due ON documents(kind, due) WHERE due IS NOT NULL;
CREATE INDEX documents_by_end ON documents(expires) WHERE expires IS NOT NULL;
"""
_FIELDS = "kind, id, tenant, body, version, due, expires"
_KEY = "tenant = ? AND kind = ? AND id = ?"
_ALIVE = "(expires IS NULL OR expires > ?)"


def read(db: apsw.Connection, tenant: str, kind: str, id: str, now: float) -> Document:
    """Return a document. Raises StateNotFound."""
    found = _select(db, f"{_KEY} AND {_ALIVE}", tenant, kind, id, now)
    if not found:
        raise no_document(kind, id)
    return found[0]


def write(db: apsw.Connection, document: Document, expected: int | None, now: float) -> tuple[int, int]:
    """Write a document. Return its new version, and by how many bytes the tenant's documents have grown. Raises DocumentMoved."""
    key = (document.tenant, document.kind, document.id)
    freed = _delete(db, f"{_KEY} AND NOT {_ALIVE}", *key, now)[document.tenant]
    old = _select(db, _KEY, *key)
    _check(document.kind, document.id, old[0].version if old else 0, expected)
    version: int = db.execute(
        f"INSERT INTO documents({_FIELDS}) VALUES (?, ?, ?, ?, 1, ?, ?) ON CONFLICT DO UPDATE SET "
        "body = excluded.body, version = version + 1, due = excluded.due, expires = excluded.expires RETURNING version",
        (document.kind, document.id, document.tenant, document.body, document.due, document.expires),
    ).get
    return version, len(document.body) - sum(len(each.body) for each in old) - freed


def erase(db: apsw.Connection, tenant: str, kind: str, id: str, expected: int | None, now: float) -> int:
    """Delete a document, and return the number of its bytes. Raises StateNotFound or DocumentMoved."""
    _check(kind, id, read(db, tenant, kind, id, now).version, expected)
    return _delete(db, _KEY, tenant, kind, id)[tenant]


def page(db: apsw.Connection, tenant: str, kind: str, after: str | None, limit: int, now: float) -> list[Document]:
    """Return a page of the documents of one kind, newest first. Raises StateNotFound if there is no document `after`."""
    where = f"tenant = ? AND kind = ? AND {_ALIVE}"
    values: list[str | float] = [tenant, kind, now]
    if after is not None:
        seq = db.execute(f"SELECT seq FROM documents WHERE {_KEY}", (tenant, kind, after)).get
        if seq is None:
            raise no_page(kind, after)
        where += " AND seq < ?"
        values.append(seq)
    return _select(db, f"{where} ORDER BY seq DESC LIMIT ?", *values, limit)


def due(db: apsw.Connection, kind: str, until: float, limit: int, now: float) -> list[Document]:
    """Return documents of all tenants whose `due` is at most `until`, the earliest due first."""
    return _select(db, f"kind = ? AND due <= ? AND {_ALIVE} ORDER BY due, seq LIMIT ?", kind, until, now, limit)


def expire(db: apsw.Connection, now: float, most: int) -> list[tuple[str, int]]:
    """Delete at most `most` documents that have expired. Return the tenant and the number of bytes of each."""
    old = "SELECT seq FROM documents WHERE expires <= ? LIMIT ?"
    rows: list[Any] = db.execute(f"DELETE FROM documents WHERE seq IN ({old}) RETURNING tenant, length(body)", (now, most)).fetchall()
    return rows


def _check(kind: str, id: str, version: int, expected: int | None) -> None:
    """Raise DocumentMoved unless the version is the expected one."""
    if expected is not None and expected != version:
        raise document_moved(kind, id, version, expected)


def _select(db: apsw.Connection, where: str, *values: str | float) -> list[Document]:
    rows = db.execute(f"SELECT {_FIELDS} FROM documents WHERE {where}", values)
    return [Document(**dict(zip(_FIELDS.split(", "), row, strict=True))) for row in rows]


def _delete(db: apsw.Connection, where: str, *values: str | float) -> Counter[str]:
    """Delete the documents that match `where`. Return the number of their bytes, by tenant."""
    sizes: Counter[str] = Counter()
    for tenant, size in db.execute(f"DELETE FROM documents WHERE {where} RETURNING tenant, length(body)", values):
        sizes[tenant] += size
    return sizes
