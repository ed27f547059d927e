"""The rows of one tenant in one transaction: read once, changed here, and then committed together by the store.

`Rows` has the rules for what depends on several rows: usage, quotas, versions of names, and rows that stay after their state has gone.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import orjson

from service.states import refusals
from service.states.backend import Backend, Changes, KeptKey, Key, Meta, Sharing, Tenant
from service.states.record import DOCUMENT_BYTES, Document, IdempotencyKey, Name, NameChange, Quota, StateRecord, Status, Usage

GONE_SHARE = 16  # the token ids of states that are gone take at most this share of a tenant's bytes, beyond its quota
MOST_NAMES = 10_000  # limit on the names of a tenant
_OLDEST = 16  # rows of an index that are read at once
_TRIMMED = 256  # limit on the rows of an index that one transaction deletes because there are too many


class Rows(Changes):
    """The rows that one transaction reads and changes. `keys`: rows to read at once."""

    def __init__(self, store: Backend, tenant: str, keys: Sequence[Key], now: float, *, frees: bool) -> None:
        super().__init__(tenant, frees)
        self.now = now
        self.ended: Counter[Status] = Counter()
        self._new_kin: Counter[str] = Counter()  # parent -> number of rows of its children that are added here, less those deleted
        self._store = store
        self.load([("tenant",), *keys])

    def load(self, keys: Iterable[Key]) -> None:
        """Read rows that were not read yet, all at once."""
        if new := [key for key in keys if key not in self.before]:
            self.before.update(zip(new, self._store.rows(self.tenant, new), strict=True))

    def get(self, *key: str) -> Any:
        """Return a row as it is after the changes so far."""
        if key in self.after:
            return self.after[key]
        self.load([key])
        return self.before[key]

    @property
    def usage(self) -> Tenant:
        row: Tenant = self.get("tenant")
        return row

    def count(self, **changes: int) -> None:
        """Add to the numbers of the tenant with these names."""
        usage = self.usage
        self.after["tenant",] = usage._replace(**{name: getattr(usage, name) + by for name, by in changes.items()})

    # States ----------------------------------------------------------------------------------------------------------------------------

    def state(self, id: str) -> StateRecord | None:
        found: StateRecord | None = self.get("state", id)
        return found

    def ready(self, id: str) -> StateRecord:
        """Return a state as it is after the changes so far. Raises StateNotFound or StateGone."""
        record = checked(self.state(id), id, self.now)
        return replace(record, shared_by=self.get("sharing", record.sha256).states)

    def set_state(self, id: str, new: StateRecord | None) -> None:
        """Write or delete the row of a state, and count what this changes for its blob, its parent and its tenant."""
        old = self.state(id)
        for record, by in ((old, -1), (new, 1)):
            if record is None:
                continue
            if record.status == "ready":
                states, pins = self.get("sharing", record.sha256)
                now = Sharing(states + by, pins + by * record.pinned)
                size, pinned = ((after > 0) - (before > 0) for before, after in zip((states, pins), now, strict=True))
                self.after["sharing", record.sha256] = now
                self.count(states=by, size=size * record.size + by * row_size(record), pinned_size=pinned * record.size)
            else:
                self.count(gone=by, gone_size=by * row_size(record))
            if (old is None or new is None) and record.parent is not None:
                self._new_kin[record.parent] += by
        self.after["state", id] = new

    def drop(self, id: str, why: Status) -> None:
        """End a state: release its blob, its names and its metadata, and its token ids unless it has children, whose texts begin with them.
        Its row stays while it has children, or requests for it get the reason."""
        self.load([("state", id), ("named", id), ("kin", id)])
        record = self.state(id)
        assert record is not None
        for name in self.get("named", id):
            if (found := self.get("name", name)) is not None and found.state == id:
                self.unname(name)
        used = -math.inf if why == "deleted" else self.now  # nobody gets the reason of a deletion
        ids_size = record.ids_size if self._kin(id) else 0
        if not ids_size:
            self.ids[id] = b""
        self.set_state(id, replace(record, status=why, pinned=False, used=used, metadata={}, ids_size=ids_size))
        self.ended[why] += 1

    def make_room(self, quota: Quota, keep: Sequence[str] = ()) -> None:
        """Evict the states that were used least recently, are not pinned and not in `keep`, until the tenant is within its quota. Then
        delete the oldest idempotency keys and rows of states that are gone, if there are too many. Raises QuotaExceeded."""
        candidates = self._oldest("lru", "state", "named", "kin")
        while self.usage.states > quota.states or self.usage.size > quota.size:
            oldest = next((id for id in candidates if id not in keep), None)
            if oldest is None:
                raise refusals.over_quota(Usage(self.usage.states, self.usage.size), quota)
            self.drop(oldest, "evicted")
        keys, gone = islice(self._oldest("keys", "key"), _TRIMMED), islice(self._oldest("gone", "state", "kin"), _TRIMMED)
        while self.usage.keys > quota.states and (key := next(keys, None)) is not None:
            self.write("key", key, None)
        while (self.usage.gone > quota.states or self.usage.gone_size > quota.size // GONE_SHARE) and (id := next(gone, None)) is not None:
            self._delete(id, -math.inf)

    def _oldest(self, index: str, *tables: str) -> Iterator[str]:
        """Yield the ids of an index, the oldest first, without those that were changed here; at last the changed states that are ready.

        `tables`: the tables whose rows the caller needs, first that of the index."""
        changed, at = [], 0
        while page := self._store.oldest(self.tenant, index, at, _OLDEST):
            at += len(page)
            self.load([(table, id) for id in page for table in tables])
            for id in page:
                if (tables[0], id) in self.after:
                    changed.append(id)
                else:
                    yield id
        yield from (id for id in changed if index == "lru" and self.get("state", id).status == "ready")

    def forget(self, id: str, until: float) -> None:
        """Delete the row of a state that is gone. If it has children, it stays until the last of them is deleted."""
        record = self.state(id)
        if record is None or record.status == "ready":
            return
        if self._kin(id):
            self.set_state(id, replace(record, used=math.inf))  # until then no sweep finds it
            return
        self._delete(id, until)

    def _delete(self, id: str, until: float) -> None:
        """Delete the row of a state that is gone. The lineages of its children end before it from now on. If its parent's row stayed for
        this child only, the next sweep deletes the parent's row too."""
        record = self.state(id)
        self.set_state(id, None)
        if record is None or record.parent is None:
            return
        parent = self.state(record.parent)
        if parent is None or parent.status == "ready" or self._kin(parent.id):
            return
        if parent.status == "deleted" or parent.used == math.inf or parent.used <= until:
            self.set_state(parent.id, replace(parent, used=-math.inf))  # the next sweep deletes it

    def _kin(self, id: str) -> bool:
        return bool(self.get("kin", id) + self._new_kin[id] > 0)

    # Names and keys --------------------------------------------------------------------------------------------------------------------

    def write(self, table: Literal["name", "key"], id: str, row: Name | KeptKey | None) -> None:
        """Write or delete a row of the names or the keys, and count it."""
        self.count(**{f"{table}s": (row is not None) - (self.get(table, id) is not None)})
        self.after[table, id] = row

    def check(self, change: NameChange) -> Name | None:
        """Return the name, None if it is new. Raises NameMoved if the change expects another version."""
        found: Name | None = self.get("name", change.name)
        version = 0 if found is None else found.version
        if change.version is not None and change.version != version:
            raise refusals.name_moved(change, version)
        return found

    def move(self, change: NameChange, state: str) -> Name:
        """Point a name to a state. No version is used twice: the versions of new names begin above those of deleted ones. Raises NameMoved,
        or QuotaExceeded if the name is new and there are too many."""
        found = self.check(change)
        if found is None and self.usage.names >= MOST_NAMES:
            raise refusals.too_many_names(change.name, self.usage.names)
        moved = Name(change.name, state, (self.usage.version_floor if found is None else found.version) + 1)
        self.write("name", change.name, moved)
        return moved

    def unname(self, name: str) -> None:
        found: Name = self.get("name", name)
        self.write("name", name, None)
        self.after["tenant",] = self.usage._replace(version_floor=max(self.usage.version_floor, found.version))

    def made(self, key: IdempotencyKey, since: float) -> str | None:
        """Return the id of the state that an earlier request with this key has made, or None. Raises KeyReused."""
        found: KeptKey | None = self.get("key", key.key)
        if found is None or found.created <= since:
            return None
        if found.digest != key.digest:
            raise refusals.key_reused(key)
        return found.state

    # Documents -------------------------------------------------------------------------------------------------------------------------

    def document(self, kind: str, id: str) -> Meta | None:
        """Return a document, also an expired one."""
        found: Meta | Document | None = self.get("document", kind, id)
        if isinstance(found, Document):
            return Meta(found.version, len(found.body), found.due, found.expires, found.seq)
        return found

    def write_document(self, document: Document, expected: int | None) -> int:
        """Write a document, and return its new version. An expired one counts as missing. Raises DocumentMoved."""
        kind, id = document.kind, document.id
        old = self.document(kind, id)
        version, seq = (0, 0) if old is None or is_over(old.expires, self.now) else (old.version, old.seq)
        if expected is not None and expected != version:
            raise refusals.document_moved(kind, id, version, expected)
        self.count(size=len(document.body) - old.size if old is not None else DOCUMENT_BYTES + len(document.body))
        self.after["document", kind, id] = replace(document, version=version + 1, seq=seq)
        return version + 1

    def erase(self, kind: str, id: str) -> None:
        old = self.document(kind, id)
        assert old is not None
        self.count(size=-DOCUMENT_BYTES - old.size)
        self.after["document", kind, id] = None

    # The sweep -------------------------------------------------------------------------------------------------------------------------

    def end(self, index: str, members: Sequence[str], until: float) -> None:
        """End or delete the rows whose time was over when the sweep found them, unless they have changed since then."""
        if tables := {"end": ["state", "named", "kin"], "gone": ["state", "kin"], "keys": ["key"]}.get(index):
            self.load([(table, member) for member in members for table in tables])
        self.load([("sharing", row.sha256) for row in list(self.before.values()) if isinstance(row, StateRecord)])
        for member in members:
            if index == "end":
                if (state := self.state(member)) is not None and state.status == "ready" and is_over(state.expires, until):
                    self.drop(member, "expired")
            elif index == "gone":
                self.forget(member, until)
            elif index == "keys":
                if (kept := self.get("key", member)) is not None and kept.created <= until:
                    self.write("key", member, None)
            else:
                kind, id = member.split(":", 1)
                if (found := self.document(kind, id)) is not None and is_over(found.expires, until):
                    self.erase(kind, id)


def row_size(record: StateRecord) -> int:
    """Return the bytes of a state's metadata and token ids."""
    return len(orjson.dumps(record.metadata)) - len("{}") + record.ids_size


def is_over(expires: float | None, now: float) -> bool:
    return expires is not None and expires <= now


def checked(record: StateRecord | None, id: str, now: float) -> StateRecord:
    """Return a state that is ready. Raises StateNotFound, or StateGone with the reason."""
    if record is None or record.status == "deleted":
        raise refusals.no_state(id)
    if record.status != "ready" or is_over(record.expires, now):
        raise refusals.gone(id, "expired" if record.status == "ready" else record.status)
    return record
