"""The tables of the store in SQLite, the statements that read them, and the conversion of a row to a state."""

from typing import Any

import orjson

from service.states.record import DOCUMENT_BYTES, StateRecord

FILE = "states.sqlite3"
VERSION = 3

_TENANTS = """
CREATE TABLE tenants(
    tenant TEXT PRIMARY KEY, states INTEGER NOT NULL, size INTEGER NOT NULL, pinned_size INTEGER NOT NULL, version_floor INTEGER NOT NULL,
    names INTEGER NOT NULL, keys INTEGER NOT NULL, gone INTEGER NOT NULL, gone_size INTEGER NOT NULL
) WITHOUT ROWID;
"""
_BY_AGE = """
CREATE INDEX states_gone_by_tenant ON states(tenant, used) WHERE status != 'ready';
CREATE INDEX keys_by_tenant ON keys(tenant, created);
"""
SCHEMA = f"""
CREATE TABLE documents(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL,
    version INTEGER NOT NULL, due REAL, expires REAL, UNIQUE(tenant, kind, id)
);
CREATE INDEX documents_by_kind ON documents(tenant, kind, seq);
CREATE INDEX documents_by_due ON documents(kind, due) WHERE due IS NOT NULL;
CREATE INDEX documents_by_end ON documents(expires) WHERE expires IS NOT NULL;
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
CREATE TABLE names(
    tenant TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL, version INTEGER NOT NULL, PRIMARY KEY(tenant, name)
) WITHOUT ROWID;
CREATE INDEX names_by_state ON names(state);
CREATE TABLE keys(
    tenant TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY(tenant, key)
) WITHOUT ROWID;
CREATE INDEX keys_by_age ON keys(created);
{_TENANTS}
{_BY_AGE}
"""
_ROW_SIZE = "length(CAST(metadata AS BLOB)) - length('{}') + length(ids)"
COUNT = f"""
INSERT INTO tenants SELECT
    t.tenant,
    (SELECT count(*) FROM states WHERE tenant = t.tenant AND status = 'ready'),
    (SELECT coalesce(sum(size), 0) FROM blobs WHERE tenant = t.tenant)
        + (SELECT coalesce(sum({DOCUMENT_BYTES} + length(body)), 0) FROM documents WHERE tenant = t.tenant)
        + (SELECT coalesce(sum({_ROW_SIZE}), 0) FROM states WHERE tenant = t.tenant AND status = 'ready'),
    (SELECT coalesce(sum(size), 0) FROM blobs WHERE tenant = t.tenant AND pins),
    t.version_floor,
    (SELECT count(*) FROM names WHERE tenant = t.tenant),
    (SELECT count(*) FROM keys WHERE tenant = t.tenant),
    (SELECT count(*) FROM states WHERE tenant = t.tenant AND status != 'ready'),
    (SELECT coalesce(sum({_ROW_SIZE}), 0) FROM states WHERE tenant = t.tenant AND status != 'ready')
FROM """  # what follows from the other tables, for the tenants of a table with the columns `tenant` and `version_floor`
UPGRADES = [  # the statements that make version 2 of version 1, and so on
    "ALTER TABLE tenants ADD COLUMN version_floor INTEGER NOT NULL DEFAULT 0;",
    f"""
    UPDATE states SET metadata = '{{}}' WHERE status != 'ready';
    ALTER TABLE tenants RENAME TO old;
    {_TENANTS}
    {_BY_AGE}
    {COUNT} old t;
    DROP TABLE old;
    """,
]
FIELDS = (
    "id, tenant, model, fingerprint, numerics, position, parent, origin, created, used, expires, pinned, metadata, turn, sha256, "
    "size, status"
)
_OF_RECORD = [*FIELDS.split(", "), "seq", "shared_by", "ids_size"]
SELECT = "SELECT " + ", ".join(f"s.{each}" for each in FIELDS.split(", ")) + ", s.seq, coalesce(b.refs, 0), length(s.ids)"
FROM = "FROM states s LEFT JOIN blobs b ON b.id = s.blob"

ROWS = {  # the statements that read one row, by its table in `backend.py`; the key follows the tenant
    "tenant": "SELECT states, size, pinned_size, version_floor, names, keys, gone, gone_size FROM tenants WHERE tenant = ?",
    "state": f"{SELECT} {FROM} WHERE s.tenant = ? AND s.id = ?",
    "sharing": "SELECT refs, pins FROM blobs WHERE tenant = ? AND sha256 = ?",
    "kin": "SELECT count(*) FROM states WHERE tenant = ? AND parent = ?",
    "named": "SELECT json_group_array(name ORDER BY name) FROM names WHERE tenant = ? AND state = ?",
    "name": "SELECT name, state, version FROM names WHERE tenant = ? AND name = ?",
    "key": "SELECT digest, state, created FROM keys WHERE tenant = ? AND key = ?",
    "document": "SELECT version, length(body), due, expires, seq FROM documents WHERE tenant = ? AND kind = ? AND id = ?",
    "body": "SELECT body FROM documents WHERE tenant = ? AND kind = ? AND id = ?",
}
STATES = f"{SELECT} FROM json_each(?) j CROSS JOIN states s ON s.id = j.value LEFT JOIN blobs b ON b.id = s.blob WHERE s.tenant = ?"
OLDEST = {  # ids of an index, the earliest first
    "lru": "SELECT id FROM states WHERE tenant = ? AND status = 'ready' AND NOT pinned ORDER BY used",
    "gone": "SELECT id FROM states WHERE tenant = ? AND status != 'ready' ORDER BY used",
    "keys": "SELECT key FROM keys WHERE tenant = ? ORDER BY created",
}
_NEWEST = "AND seq < ? ORDER BY seq DESC LIMIT ?"
NEWEST = {  # ids of an index, newest first
    "ready": f"SELECT id FROM states WHERE tenant = ? AND status = 'ready' {_NEWEST}",
    "docs": f"SELECT id FROM documents WHERE tenant = ? AND kind = ? {_NEWEST}",
}
TIMED = {  # tenants and members of an index up to a time
    "end": "SELECT tenant, id FROM states WHERE status = 'ready' AND expires <= ? ORDER BY expires LIMIT ?",
    "gone": "SELECT tenant, id FROM states WHERE status != 'ready' AND used <= ? ORDER BY used LIMIT ?",
    "keys": "SELECT tenant, key FROM keys WHERE created <= ? ORDER BY created LIMIT ?",
    "docs_end": "SELECT tenant, kind || ':' || id FROM documents WHERE expires <= ? ORDER BY expires LIMIT ?",
    "due": "SELECT tenant, id FROM documents WHERE kind = ? AND due <= ? AND (expires IS NULL OR expires > ?) ORDER BY due, seq LIMIT ?",
}


def record_of(row: tuple[Any, ...]) -> StateRecord:
    """Return the state in a row that `SELECT` returns."""
    fields = dict(zip(_OF_RECORD, row, strict=True))
    return StateRecord(**{**fields, "metadata": orjson.loads(fields["metadata"]), "pinned": bool(fields["pinned"])})
