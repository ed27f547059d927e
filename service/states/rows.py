"""The rows of one tenant in one transaction: read once, changed here, and then committed together by the store.

`Rows` has the rules for what depends on several rows: usage, quotas, versions of names, and rows that stay after their state has gone.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from service.states import refusals
from service.states.backend import Backend, Changes, KeptKey, Key, Meta, Sharing, Tenant
from service.states.record import Document, IdempotencyKey, Name, NameChange, Quota, StateRecord, Status, Usage

_LEAST_USED = 16  # candidates for eviction that are read at once


class Rows(Changes):
    """The rows that one transaction reads and changes. `keys`: rows to read at once."""

    def __init__(self, store: Backend, tenant: str, keys: Sequence[Key], now: float, *, frees: bool) -> None:
        super().__init__(tenant, frees)
        self.now = now
        self.ended: Counter[Status] = Counter()
        self._forgotten: Counter[str] = Counter()  # parent -> number of its children whose rows are deleted here
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

    def count(self, *, states: int = 0, size: int = 0, pinned_size: int = 0) -> None:
        usage = self.usage
        self.after["tenant",] = replace(
            usage, states=usage.states + states, size=usage.size + size, pinned_size=usage.pinned_size + pinned_size
        )

    # States ----------------------------------------------------------------------------------------------------------------------------

    def state(self, id: str) -> StateRecord | None:
        found: StateRecord | None = self.get("state", id)
        return found

    def ready(self, id: str) -> StateRecord:
        """Return a state as it is after the changes so far. Raises StateNotFound or StateGone."""
        record = checked(self.state(id), id, self.now)
        return replace(record, shared_by=self.get("sharing", record.sha256).states)

    def set_state(self, id: str, new: StateRecord | None) -> None:
        """Write or delete the row of a state, and count what this changes for its blob and its tenant."""
        for record, by in ((self.state(id), -1), (new, 1)):
            if record is not None and record.status == "ready":
                states, pins = self.get("sharing", record.sha256)
                now = Sharing(states + by, pins + by * record.pinned)
                size, pinned = ((new > 0) - (old > 0) for old, new in zip((states, pins), now, strict=True))
                self.after["sharing", record.sha256] = now
                self.count(states=by, size=size * record.size, pinned_size=pinned * record.size)
        self.after["state", id] = new

    def drop(self, id: str, why: Status) -> None:
        """End a state: release its blob and its names. Its row stays while it has children, or requests for it get the reason."""
        self.load([("state", id), ("named", id)])
        record = self.state(id)
        assert record is not None
        for name in self.get("named", id):
            if (found := self.get("name", name)) is not None and found.state == id:
                self.unname(name)
        used = -math.inf if why == "deleted" else self.now  # nobody gets the reason of a deletion
        self.set_state(id, replace(record, status=why, pinned=False, used=used))
        self.ended[why] += 1

    def make_room(self, quota: Quota, keep: Sequence[str] = ()) -> None:
        """Evict the states that were used least recently, are not pinned and not in `keep`, until the tenant is within its quota. Raises
        QuotaExceeded."""
        candidates = self._least_used()
        while self.usage.states > quota.states or self.usage.size > quota.size:
            oldest = next((id for id in candidates if id not in keep), None)
            if oldest is None:
                raise refusals.over_quota(Usage(self.usage.states, self.usage.size), quota)
            self.drop(oldest, "evicted")

    def _least_used(self) -> Iterator[str]:
        used_here, at = [], 0
        while page := self._store.least_used(self.tenant, at, _LEAST_USED):
            at += len(page)
            self.load([(kind, id) for id in page for kind in ("state", "named")])
            for id in page:
                if ("state", id) in self.after:
                    used_here.append(id)
                else:
                    yield id
        yield from (id for id in used_here if self.get("state", id).status == "ready")

    def forget(self, id: str, until: float) -> None:
        """Delete the row of a state that is gone. If it has children, it stays until the last of them is deleted."""
        record = self.state(id)
        if record is None or record.status == "ready":
            return
        if self._kin(id):
            self.set_state(id, replace(record, used=math.inf))  # until then no sweep finds it
            return
        self.set_state(id, None)
        if record.parent is None:
            return
        self._forgotten[record.parent] += 1
        parent = self.state(record.parent)
        if parent is None or parent.status == "ready" or self._kin(parent.id):
            return
        if parent.status == "deleted" or parent.used == math.inf or parent.used <= until:
            self.set_state(parent.id, replace(parent, used=-math.inf))  # the next sweep deletes it

    def _kin(self, id: str) -> bool:
        return bool(self.get("kin", id) > self._forgotten[id])

    # Names and keys --------------------------------------------------------------------------------------------------------------------

    def check(self, change: NameChange) -> Name | None:
        """Return the name, None if it is new. Raises NameMoved if the change expects another version."""
        found: Name | None = self.get("name", change.name)
        version = 0 if found is None else found.version
        if change.version is not None and change.version != version:
            raise refusals.name_moved(change, version)
        return found

    def move(self, change: NameChange, state: str) -> Name:
        """Point a name to a state. No version is used twice: the versions of new names begin above those of deleted ones."""
        found = self.check(change)
        moved = Name(change.name, state, (self.usage.version_floor if found is None else found.version) + 1)
        self.after["name", change.name] = moved
        return moved

    def unname(self, name: str) -> None:
        found: Name = self.get("name", name)
        self.after["name", name] = None
        self.after["tenant",] = replace(self.usage, version_floor=max(self.usage.version_floor, found.version))

    def answered(self, key: IdempotencyKey, since: float) -> StateRecord | None:
        """Return the state that an earlier request with this key has made, or None. Raises KeyReused, StateNotFound or StateGone."""
        found: KeptKey | None = self.get("key", key.key)
        if found is None or found.created <= since:
            return None
        if found.digest != key.digest:
            raise refusals.key_reused(key)
        return self.ready(found.state)

    # Documents -------------------------------------------------------------------------------------------------------------------------

    def document(self, kind: str, id: str) -> Meta | None:
        """Return a document, also an expired one."""
        found: Meta | Document | None = self.get("document", kind, id)
        if isinstance(found, Document):
            return Meta(found.version, len(found.body), found.due, found.expires, found.seq)
        return found

    def write(self, document: Document, expected: int | None) -> int:
        """Write a document, and return its new version. An expired one counts as missing. Raises DocumentMoved."""
        kind, id = document.kind, document.id
        old = self.document(kind, id)
        version, seq = (0, 0) if old is None or is_over(old.expires, self.now) else (old.version, old.seq)
        if expected is not None and expected != version:
            raise refusals.document_moved(kind, id, version, expected)
        self.count(size=len(document.body) - (0 if old is None else old.size))
        self.after["document", kind, id] = replace(document, version=version + 1, seq=seq)
        return version + 1

    def erase(self, kind: str, id: str) -> None:
        old = self.document(kind, id)
        assert old is not None
        self.count(size=-old.size)
        self.after["document", kind, id] = None

    # The sweep -------------------------------------------------------------------------------------------------------------------------

    def end(self, index: str, members: Sequence[str], until: float) -> None:
        """End or delete the rows whose time was over when the sweep found them, unless they have changed since then."""
        if tables := {"end": ["state", "named"], "gone": ["state", "kin"], "keys": ["key"]}.get(index):
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
                    self.after["key", member] = None
            else:
                kind, id = member.split(":", 1)
                if (found := self.document(kind, id)) is not None and is_over(found.expires, until):
                    self.erase(kind, id)


def is_over(expires: float | None, now: float) -> bool:
    return expires is not None and expires <= now


def checked(record: StateRecord | None, id: str, now: float) -> StateRecord:
    """Return a state that is ready. Raises StateNotFound, or StateGone with the reason."""
    if record is None or record.status == "deleted":
        raise refusals.no_state(id)
    if record.status != "ready" or is_over(record.expires, now):
        raise refusals.gone(id, "expired" if record.status == "ready" else record.status)
    return record
