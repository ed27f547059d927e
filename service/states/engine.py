"""What a store of states does: names, quotas, forks, lineages, expiry and keys, once for all stores.

`StateEngine` is written over a small backend (`backend.py`), which `SqliteEngine` and `RedisEngine` add. A call that changes something is a
transaction of one tenant:

1. `rows` gives the rows that the call needs, with the version of the tenant. `Rows` computes all changes from them, in Python.
2. `commit` applies the changes together, if the tenant's version still holds, else nothing, and the call begins again. In SQLite the
   transaction holds the write lock, so the version always holds. In Redis it is a number that every commit increments.

So a refusal leaves nothing behind, and is sent only if what it was computed from still holds.

All calls block. Each call is atomic, and its changes are durable when it returns, within the limits that the backend's docstring states. No
call reveals the data of another tenant: another tenant's id is treated as unknown.
"""

import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from service.errors import ServiceError, StoreFailed
from service.states import refusals
from service.states.backend import Backend, KeptKey, Key, Tenant
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
    Usage,
)
from service.states.rows import Rows, checked, is_over

T = TypeVar("T")

SWEPT = 256  # limit on the rows that one call of `sweep` ends or deletes, because other calls of the store wait during the call
TOMBSTONE_S = 86_400.0  # seconds for which requests for a state that is gone are answered with the reason
KEY_S = 86_400.0  # seconds for which an idempotency key is kept
_SCAN = 200  # limit on the rows of a page or a lineage that are read at once
_TRIES = 500  # of a commit; between two of them another process has committed
_PAUSE_S = 0.002  # longest pause before another try


class StateEngine(Backend):
    """A store of states. Use it on one thread.

    Up to `group_size` calls become durable together, in a `group`. `failures`: errors for which `group` raises StoreFailed. `ended`: the
    number of states that calls of this process have ended, by status. `damaged_blobs`: the number of blobs that this process has found
    damaged.
    """

    group_size = 1
    failures: tuple[type[Exception], ...] = ()

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.ended: Counter[Status] = Counter()
        self.damaged_blobs = 0

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
        """Store a state, and return its record. `blob` None: the state shares its parent's blob. `ids`: the token ids since its parent.

        If `key` was used for the same request before, nothing is written, and the earlier request's state is returned. If a state with this
        id was stored before with the same bytes, nothing is written either: another generator may have written it before it was lost.
        Raises StateNotFound or StateGone for the parent, NameMoved, KeyReused, QuotaExceeded.
        """
        return self._add([Fork(record, key)], quota, blob, ids, name)[0]

    def fork(self, forks: Sequence[Fork], quota: Quota) -> list[StateRecord]:
        """Store several states that share the blob of one parent, each like `put` with `blob` None. All of them are stored, or none."""
        return self._add(forks, quota, None, b"", None)

    def _add(self, forks: Sequence[Fork], quota: Quota, blob: bytes | None, ids: bytes, name: NameChange | None) -> list[StateRecord]:
        sha256 = "" if blob is None else hashlib.sha256(blob).hexdigest()

        def add(rows: Rows) -> list[StateRecord]:
            earlier = [self._earlier(rows, fork, sha256) for fork in forks]
            new = [fork for fork, found in zip(forks, earlier, strict=True) if found is None]
            if new:
                size = len(blob or b"")
                if blob is None:
                    parent = rows.ready(new[0].record.parent or "")
                    rows.set_state(parent.id, replace(parent, used=rows.now))  # so that it is not evicted before its own forks
                self._write_states(rows, new, (sha256, size) if blob is not None else (parent.sha256, parent.size), ids)
                if blob is not None:
                    rows.content[sha256] = blob
                if name is not None:
                    rows.move(name, new[0].record.id)
                rows.make_room(quota, [fork.record.id for fork in forks])
            return [found or rows.ready(fork.record.id) for found, fork in zip(earlier, forks, strict=True)]

        keys: list[Key] = [("state", fork.record.id) for fork in forks]
        keys += [("key", fork.key.key) for fork in forks if fork.key]
        keys += [("sharing", sha256)] if sha256 else [("state", forks[0].record.parent or "")]
        return self._change(forks[0].record.tenant, add, *keys, *_name_keys(name))

    def _earlier(self, rows: Rows, fork: Fork, sha256: str) -> StateRecord | None:
        """Return the state that an earlier call has made for this one, known by its key or its id, or None."""
        record, key = fork
        if key is not None and (made := rows.made(key, rows.now - KEY_S)) is not None:
            return rows.ready(made)
        if (kept := rows.state(record.id)) is None:
            return None
        if kept.parent != record.parent or (sha256 and kept.sha256 != sha256):
            raise StoreFailed(f"the store of states has another state {record.id}: use a new id")
        return rows.ready(record.id)

    def _write_states(self, rows: Rows, forks: Sequence[Fork], blob: tuple[str, int], ids: bytes) -> None:
        for record, key in forks:
            rows.set_state(record.id, replace(record, sha256=blob[0], size=blob[1], ids_size=len(ids), status="ready", seq=0))
            rows.ids[record.id] = ids
            if key is not None:
                rows.write("key", key.key, KeptKey(key.digest, record.id, rows.now))

    def get(self, tenant: str, state: str) -> StateRecord:
        """Return the record of a state. Raises StateNotFound, or StateGone with the reason."""
        return checked(self._row(tenant, "state", state), state, self._clock())

    def status(self, tenant: str, state: str) -> Status:
        """Return whether a state is ready, or why it is gone. A state that the store does not know counts as deleted."""
        record: StateRecord | None = self._row(tenant, "state", state)
        if record is None:
            return "deleted"
        return "expired" if record.status == "ready" and is_over(record.expires, self._clock()) else record.status

    def use(self, tenant: str, state: str) -> StateRecord:
        """Return the record as `get` does, and set the state's time of last use to now, so that older states are evicted first."""
        record = self.get(tenant, state)
        self.touch(tenant, state, self._clock())
        return record

    def blob(self, tenant: str, state: str) -> bytes:
        """Return the bytes of a state, after checking their hash. If the bytes are damaged, all states that share them become gone. Raises
        StateNotFound or StateGone."""
        record = self.use(tenant, state)
        content: bytes | None = self.content(tenant, record)
        if content is None or not _is(content, record.sha256):
            content = self._change(tenant, lambda rows: self._set_apart(rows, record), frees=True)
        if content is None:
            self.damaged_blobs += 1
            raise refusals.gone(state, "damaged")
        return content

    def _set_apart(self, rows: Rows, record: StateRecord) -> bytes | None:
        """End all states that share damaged bytes, and return None; or return the bytes, if they were replaced meanwhile."""
        content = self.content(rows.tenant, record)
        if _is(content, record.sha256):
            return content
        for state in self.sharing(rows.tenant, record.sha256):
            rows.drop(state, "damaged")
        rows.apart[record.sha256] = content
        return None

    def page(self, tenant: str, wanted: Filter) -> list[StateRecord]:
        """Return the tenant's states that match the filter `wanted` and are ready, newest first."""
        below, now = math.inf, self._clock()
        if wanted.after is not None:
            if (last := self._row(tenant, "state", wanted.after)) is None:
                raise refusals.no_page("state", wanted.after)
            below = last.seq
        if wanted.name is not None:
            name = self._row(tenant, "name", wanted.name)
            found = [] if name is None else self.rows(tenant, [("state", name.state)])
            return [each for each in found if each is not None and each.seq < below and _fits(each, wanted, now)][: wanted.limit]
        size = _SCAN if wanted.model or wanted.origin or wanted.metadata else wanted.limit
        page: list[StateRecord] = []
        for each in self._newest(tenant, "ready", below, size):
            if _fits(each, wanted, now):
                page.append(each)
            if len(page) >= wanted.limit:
                break
        return page

    def _newest(self, tenant: str, index: str, below: float, size: int) -> Iterator[StateRecord]:
        """Yield the states of an index, newest first, `size` of them read at once."""
        while ids := self.newest(tenant, index, below, size):
            found = [each for each in self.rows(tenant, [("state", id) for id in ids]) if each is not None]
            yield from found
            if len(ids) < size or not found:
                return
            below = found[-1].seq

    def change(
        self, tenant: str, state: str, patch: Patch, *, name: NameChange | None = None, guard: NameChange | None = None
    ) -> StateRecord:
        """Change a state, point `name` to it, and return its record. Raises StateNotFound, StateGone, or NameMoved if `name` or `guard`
        expects another version."""

        def change(rows: Rows) -> StateRecord:
            record = rows.ready(state)
            if guard is not None:
                rows.check(guard)
            if name is not None:
                rows.move(name, state)
            new = {field: value for field, value in patch._asdict().items() if value is not None}
            if patch.expires is not None and math.isinf(patch.expires):
                new["expires"] = None
            if new:
                rows.set_state(state, replace(record, **new))
            return rows.ready(state)

        return self._change(tenant, change, ("state", state), *_name_keys(guard, name))

    def delete(self, tenant: str, state: str, guard: NameChange | None = None) -> None:
        """Delete a state and the names that point to it. States that were made from it are not deleted. Raises StateNotFound, StateGone, or
        NameMoved if `guard` expects another version."""

        def delete(rows: Rows) -> None:
            rows.ready(state)
            if guard is not None:
                rows.check(guard)
            rows.drop(state, "deleted")

        self._change(tenant, delete, ("state", state), ("named", state), *_name_keys(guard), frees=True)

    def lineage(self, tenant: str, state: str, most: int | None = None) -> list[Ancestor]:
        """Return the state, its parent, and so on to the first ancestor: at most `most` states. States that are gone are included."""
        self.get(tenant, state)
        line: list[Ancestor] = []
        following: str | None = state
        while following and (most is None or len(line) < most):
            part = self.line(tenant, following, _SCAN if most is None else min(_SCAN, most - len(line)))
            line += part
            following = part[-1].record.parent if part else None
        return line

    # Names and idempotency keys --------------------------------------------------------------------------------------------------------

    def name(self, tenant: str, name: str) -> Name:
        """Return a name and its state. Raises StateNotFound."""
        found: Name | None = self._row(tenant, "name", name)
        if found is None:
            raise refusals.no_name(name)
        return found

    def names(self, tenant: str, state: str) -> list[Name]:
        """Return the names that point to a state."""
        names = self.rows(tenant, [("name", name) for name in self._row(tenant, "named", state)])
        return [each for each in names if each is not None and each.state == state]

    def move(self, tenant: str, change: NameChange, state: str) -> Name:
        """Point a name to a state, and return the name. Raises StateNotFound, StateGone or NameMoved."""

        def move(rows: Rows) -> Name:
            rows.ready(state)
            return rows.move(change, state)

        return self._change(tenant, move, ("state", state), ("name", change.name))

    def unname(self, tenant: str, change: NameChange) -> None:
        """Delete a name. Raises StateNotFound or NameMoved."""

        def unname(rows: Rows) -> None:
            if rows.get("name", change.name) is None:
                raise refusals.no_name(change.name)
            rows.check(change)
            rows.unname(change.name)

        self._change(tenant, unname, ("name", change.name), frees=True)

    def made(self, tenant: str, key: IdempotencyKey) -> str | None:
        """Return the id of the state that an earlier request with this key has made, or None. Raises KeyReused if that request had other
        content."""
        now = self._clock()
        return Rows(self, tenant, [("key", key.key)], now, frees=False).made(key, now - KEY_S)

    def answered(self, tenant: str, key: IdempotencyKey) -> StateRecord | None:
        """Return the state that an earlier request with this key has made, or None. Raises KeyReused, StateNotFound or StateGone."""
        made = self.made(tenant, key)
        return None if made is None else self.get(tenant, made)

    def usage(self, tenant: str) -> Usage:
        found: Tenant = self._row(tenant, "tenant")
        return Usage(found.states, found.size, found.pinned_size)

    # Documents -------------------------------------------------------------------------------------------------------------------------

    def write(self, document: Document, expected: int | None, quota: Quota) -> int:
        """Write a document, and return its new version. `expected` is the version it must have now; 0: it must be new, None: any version.

        `document.version` is ignored. If the tenant is over its quota, states are evicted as in `put`. Raises DocumentMoved if the document
        has another version than `expected`, or QuotaExceeded.
        """
        return self.write_all([(document, expected)], quota)[0]

    def write_all(self, documents: Sequence[tuple[Document, int | None]], quota: Quota) -> list[int]:
        """Write several documents of one tenant, each with its expected version, like `write`. All of them are written, or none."""

        def write(rows: Rows) -> list[int]:
            before = rows.usage.size
            versions = [rows.write_document(document, expected) for document, expected in documents]
            if rows.usage.size > before:
                rows.make_room(quota)
            return versions

        return self._change(documents[0][0].tenant, write, *[("document", each.kind, each.id) for each, _ in documents])

    def read(self, tenant: str, kind: str, id: str) -> Document:
        """Return a document. Raises StateNotFound if there is none or it has expired."""
        if not (found := self._documents(tenant, kind, [id])):
            raise refusals.no_document(kind, id)
        return found[0]

    def _documents(self, tenant: str, kind: str, ids: Sequence[str]) -> list[Document]:
        """Return those of the documents that exist and have not expired."""
        keys: list[Key] = [(table, kind, id) for id in ids for table in ("document", "body")]
        found, now, documents = self.rows(tenant, keys), self._clock(), []
        for id, meta, body in zip(ids, found[::2], found[1::2], strict=True):
            if meta is not None and not is_over(meta.expires, now):
                fields = {"version": meta.version, "due": meta.due, "expires": meta.expires, "seq": meta.seq}
                documents.append(Document(kind=kind, id=id, tenant=tenant, body=body, **fields))
        return documents

    def erase(self, tenant: str, kind: str, id: str, expected: int | None) -> None:
        """Delete a document. Raises StateNotFound or DocumentMoved."""

        def erase(rows: Rows) -> None:
            found = rows.document(kind, id)
            if found is None or is_over(found.expires, rows.now):
                raise refusals.no_document(kind, id)
            if expected is not None and expected != found.version:
                raise refusals.document_moved(kind, id, found.version, expected)
            rows.erase(kind, id)

        self._change(tenant, erase, ("document", kind, id), frees=True)

    def documents(self, tenant: str, kind: str, after: str | None, limit: int) -> list[Document]:
        """Return a page of the documents of one kind, ordered by the time of their first write, newest first. `after`: the last id of the
        previous page.

        Raises StateNotFound if there is no document `after`.
        """
        page: list[Document] = []
        while len(page) < limit:
            below = math.inf
            if after is not None:
                if (last := self._row(tenant, "document", kind, after)) is None:
                    raise refusals.no_page(kind, after)
                below = last.seq
            ids = self.newest(tenant, f"docs:{kind}", below, limit)
            page += self._documents(tenant, kind, ids)
            if len(ids) < limit:
                break
            after = ids[-1]
        return page[:limit]

    def due(self, kind: str, now: float, limit: int) -> list[Document]:
        """Return documents of all tenants whose `due` is at most `now`, the earliest due first. Only the service's own sweeps may call
        this method."""
        found = [each for tenant, id in self.timed(f"due:{kind}", now, limit) for each in self._documents(tenant, kind, [id])]
        return [each for each in found if each.due is not None and each.due <= now]

    # The sweep -------------------------------------------------------------------------------------------------------------------------

    def sweep(self) -> bool:
        """Expire states and documents, and delete rows and bytes without references: at most `SWEPT` rows. Return whether there may be more
        to do, so that the caller calls again."""
        return self._sweep(SWEPT)

    def _sweep(self, left: int) -> bool:
        now = self._clock()
        with self.group():
            for index, until in (("end", now), ("keys", now - KEY_S), ("docs_end", now)):
                left -= self._end(index, until, left)
            while left and (ended := self._end("gone", now - TOMBSTONE_S, left)):  # again, because a deleted row's parent may be next
                left -= ended
        return not left

    def _end(self, index: str, until: float, most: int) -> int:
        """End the rows of an index whose time is at most `until`, and return their number."""
        found = self.timed(index, until, most) if most else []
        for tenant in sorted({tenant for tenant, _ in found}):
            members = [member for owner, member in found if owner == tenant]
            self._change(tenant, partial(Rows.end, index=index, members=members, until=until), frees=True)
        return len(found)

    # Transactions ----------------------------------------------------------------------------------------------------------------------

    def _change(self, tenant: str, change: Callable[[Rows], T], *keys: Key, frees: bool = False) -> T:
        """Carry out a transaction of one tenant, and return what `change` returns. `change` may be called several times.

        `keys`: rows that it needs, to read them at once. `frees`: whether it only deletes, so that a full store must accept it.
        """
        for _ in range(_TRIES):
            with self.group():
                rows = Rows(self, tenant, keys, self._clock(), frees=frees)
                try:
                    result = change(rows)
                except ServiceError:
                    rows.after.clear()
                    if self.commit(rows):
                        raise
                else:
                    if self.commit(rows):
                        self.ended.update(rows.ended)
                        return result
            time.sleep(random.uniform(0, _PAUSE_S))
        raise StoreFailed("the store of states is used by too many processes at once; send the request again later")

    def _row(self, tenant: str, *key: str) -> Any:
        return self.rows(tenant, [key])[0]


def _fits(record: StateRecord, wanted: Filter, now: float) -> bool:
    return (
        record.status == "ready"
        and not is_over(record.expires, now)
        and wanted.model in (None, record.model)
        and wanted.origin in (None, record.origin)
        and all(record.metadata.get(key) == value for key, value in wanted.metadata)
    )


def _name_keys(*changes: NameChange | None) -> list[Key]:
    return [("name", change.name) for change in changes if change is not None]


def _is(content: bytes, sha256: str) -> bool:
    return hashlib.sha256(content).hexdigest() == sha256
