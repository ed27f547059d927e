"""The tables of the store in SQLite, and the conversion of a row to a state."""

from dataclasses import replace
from typing import Any

import orjson

from service.states.record import StateRecord
from service.states.sqlite_documents import SCHEMA as _DOCUMENTS
from service.states.sqlite_names import SCHEMA as _NAMES

FILE = "states.sqlite3"
VERSION = 2
FROM_VERSION_1 = "ALTER TABLE tenants ADD COLUMN version_floor INTEGER NOT NULL DEFAULT 0"

SCHEMA = (
    _DOCUMENTS
    + """
CREATE TABLE blobs(
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, sha256 TEXT NOT NULL, size INTEGER NOT NULL,
    content BLOB, refs INTEGER NOT NULL, pins INTEGER NOT NULL, UNIQUE(tenant, sha256)
);
CREATE INDEX blobs_by_hash ON blobs(sha256);
CREATE TABLE states(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, model TEXT NOT NULL, fingerprint TEXT NOT NULL,
    numerics TEXT NOT NULL, position INTEGER NOT NULL, parent TEXT, origin TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    expires REAL, pinned INTEGER NOT NULL, metadata TEXT NOT NULL, sha256 TEXT NOT NULL, size INTEGER NOT NULL, ids BLOB NOT NULL,
    turn TEXT NOT NULL, status TEXT NOT NULL, blob INTEGER REFERENCES blobs(id)
);
CREATE INDEX states_by_tenant ON states(tenant, status, seq);
CREATE INDEX states_by_use ON states(tenant, used) WHERE status = 'ready' AND NOT pinned;
CREATE INDEX states_by_end ON states(expires) WHERE status = 'ready' AND expires IS NOT NULL;
CREATE INDEX states_by_parent ON states(parent, status, seq);
CREATE INDEX states_by_blob ON states(blob);
CREATE INDEX states_gone ON states(used) WHERE status != 'ready';
"""
    + _NAMES
    + """
CREATE TABLE keys(
    tenant TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY(tenant, key)
) WITHOUT ROWID;
CREATE INDEX keys_by_age ON keys(created);
CREATE TABLE tenants(
    tenant TEXT PRIMARY KEY, states INTEGER NOT NULL DEFAULT 0, size INTEGER NOT NULL DEFAULT 0, pinned_size INTEGER NOT NULL DEFAULT 0,
    version_floor INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
"""
)
FIELDS = (
    "id, tenant, model, fingerprint, numerics, position, parent, origin, created, used, expires, pinned, metadata, turn, sha256, "
    "size, status"
)
SELECT = "SELECT " + ", ".join(f"s.{each}" for each in FIELDS.split(", ")) + ", coalesce(b.refs, 0)"
FROM = "FROM states s LEFT JOIN blobs b ON b.id = s.blob"


def record_of(row: tuple[Any, ...]) -> StateRecord:
    """Return the state in a row that `SELECT` returns."""
    *values, status, shared_by = row
    names = FIELDS.split(", ")[:-1]
    fields = dict(zip(names, values, strict=True))
    fields["metadata"] = orjson.loads(fields["metadata"])
    fields["pinned"] = bool(fields["pinned"])
    return replace(StateRecord(**fields), status=status, shared_by=shared_by)
