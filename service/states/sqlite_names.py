"""Stores the names of states and their versions in SQLite. The functions are called in a transaction of `SqliteEngine`.

No version of a name is used twice, even if the name is deleted and made again: a tenant's `version_floor` is the highest version of its
deleted names, and the versions of new names begin above it.
"""

import apsw

from service.states.record import Name, NameChange
from service.states.refusals import name_moved, no_name

SCHEMA = """
CREATE TABLE names(
    tenant TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL, version INTEGER NOT NULL, PRIMARY KEY(tenant, name)
) WITHOUT ROWID;
CREATE INDEX names_by_state ON names(state);
"""


def find(db: apsw.Connection, tenant: str, name: str) -> Name:
    """Return a name of the tenant. Raises StateNotFound."""
    row = db.execute("SELECT name, state, version FROM names WHERE tenant = ? AND name = ?", (tenant, name)).get
    if row is None:
        raise no_name(name)
    return Name(*row)


def of_state(db: apsw.Connection, tenant: str, state: str) -> list[Name]:
    rows = db.execute("SELECT name, state, version FROM names WHERE state = ? AND tenant = ? ORDER BY name", (state, tenant))
    return [Name(*row) for row in rows]


def check(db: apsw.Connection, tenant: str, change: NameChange) -> int:
    """Return the name's version, 0 if it is new. Raises NameMoved if the change expects another version."""
    found = db.execute("SELECT version FROM names WHERE tenant = ? AND name = ?", (tenant, change.name)).get
    version = 0 if found is None else int(found)
    if change.version is not None and change.version != version:
        raise name_moved(change, version)
    return version


def move(db: apsw.Connection, tenant: str, change: NameChange, state: str) -> Name:
    """Point a name to a state, and return the name with its new version. Raises NameMoved."""
    version = check(db, tenant, change) or db.execute("SELECT version_floor FROM tenants WHERE tenant = ?", (tenant,)).get
    db.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", (tenant, change.name, state, version + 1))
    return Name(change.name, state, version + 1)


def remove(db: apsw.Connection, tenant: str, name: str) -> None:
    version = db.execute("DELETE FROM names WHERE tenant = ? AND name = ? RETURNING version", (tenant, name)).get
    db.execute("UPDATE tenants SET version_floor = max(version_floor, ?) WHERE tenant = ?", (version, tenant))
