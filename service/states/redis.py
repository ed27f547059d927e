"""The store in Redis, for services on several machines. One Lua script, redis_states.lua with redis_documents.lua, implements all calls.

Redis runs a script atomically, so each call is atomic. If one call of a group fails, the others are not undone. The changes of a call that
has returned survive kill -9 of this process; docs/states.md says which changes are lost if Redis fails. After StoreFailed it is unknown
whether the call was carried out, so read before you write again.

All keys of a tenant have the same hash tag, so they are on one node of a cluster:

| key, after `attnserve:{hash of the tenant}:` | content |
|---|---|
| usage | hash: states, size, pinned_size, the last sequence number, the highest version of a deleted name, the tenant |
| state:ID, ids:ID | a hash with the state's record; the state's token ids |
| blob:SHA256, sharing:SHA256, pins:SHA256 | the bytes; the states that share the bytes; the pinned ones among these states |
| damaged:SHA256 | damaged bytes, for a week |
| ready, lru, end | ready states by sequence number; unpinned states by time of use; states by time of expiry |
| gone | states that are gone, by the time of their end |
| children:ID, kin | the states whose parent is this state; for each parent the number of rows that name it |
| names, named:ID | a hash with the version and the state of each name; the names of a state |
| key:KEY, keys | an idempotency key; all idempotency keys by their age |
| doc:KIND:ID | a hash with a document |
| docs:KIND, due:KIND, docs_end | documents by sequence number; by the time at which they are due; by time of expiry |

`attnserve:tenants` has all tenants. A sweep runs once for each tenant: an index over all tenants would be on another node of the cluster
than a tenant's keys, so one script could not change both.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from service.errors import StateNotFound, StoreFailed
from service.states import refusals
from service.states.engine import SWEPT
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
from service.states.redis_client import connected, failing

_KEY_S = 86_400.0  # seconds for which an idempotency key is stored, as in sqlite.py
_TOMBSTONE_S = 86_400.0
_DAMAGED_S = 604_800  # seconds for which damaged bytes are kept for analysis
_TENANTS = "attnserve:tenants"
_VERSION_KEY, _VERSION = "attnserve:version", b"1"
_SCAN = (
    200  # limit on the rows that one call of the script examines, and on the tenants of one call of `sweep`: other clients wait meanwhile
)
_SCRIPT = ("redis_states.lua", "redis_documents.lua")
_Reply = list[Any]


class RedisEngine:
    """The `StateEngine` in Redis. Use it on one thread. If Redis is not reachable, calls raise StoreFailed. Later calls connect again."""

    group_size = 1  # each call is durable by itself, so there is no reason to group calls
    failures: tuple[type[Exception], ...] = ()

    def __init__(self, url: str, *, password: str | None = None, clock: Callable[[], float] = time.time) -> None:
        """`url`: redis://[USER@]HOST:PORT/DB, or rediss:// for TLS. Raises StoreFailed if Redis does not answer or may evict keys."""
        self._clock = clock
        self.ended: Counter[Status] = Counter()
        self.damaged_blobs = 0
        self._unswept: list[str] = []  # tenants for whom the current sweep has still to be done
        self._redis = connected(url, password)
        with failing():
            self._script = self._redis.register_script("".join(Path(__file__).with_name(part).read_text("utf-8") for part in _SCRIPT))
            version = _VERSION if self._redis.set(_VERSION_KEY, _VERSION, nx=True) else self._redis.get(_VERSION_KEY)
        if version != _VERSION:
            raise StoreFailed(f"the store in Redis has version {version!r}, and this release reads {_VERSION!r}: use another database")

    @contextmanager
    def group(self) -> Iterator[None]:
        """Return a context without an effect: each call in it is durable by itself, even if a later call fails."""
        yield

    spare = group

    def trouble(self) -> None:
        """Return None: if Redis is away or full, its calls fail, and the next ones try again."""

    def close(self) -> None:
        self._redis.close()

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
        return self._put([Fork(record, key)], quota, name, ids, blob)[0]

    def fork(self, forks: Sequence[Fork], quota: Quota) -> list[StateRecord]:
        return self._put(forks, quota, None, b"", None)

    def _put(self, states: Sequence[Fork], quota: Quota, name: NameChange | None, ids: bytes, blob: bytes | None) -> list[StateRecord]:
        tenant, given = states[0].record.tenant, [_given(record, self._key(key)) for record, key in states]
        arguments: dict[str, Any] = {"states": given, "quota": quota._asdict(), "change": _change(name)}
        if blob is not None:
            arguments |= {"sha256": hashlib.sha256(blob).hexdigest(), "size": len(blob)}
        evicted, found = self._call(tenant, "put", arguments, ids, *(() if blob is None else (blob,)))
        self.ended["evicted"] += evicted
        return [_record(fields) for fields in found]

    def get(self, tenant: str, state: str) -> StateRecord:
        return _record(self._call(tenant, "get", {"id": state})[0])

    def use(self, tenant: str, state: str) -> StateRecord:
        return _record(self._call(tenant, "use", {"id": state})[0])

    def blob(self, tenant: str, state: str) -> bytes:
        sha256, content = self._call(tenant, "blob", {"id": state})
        if hashlib.sha256(content).hexdigest() != sha256.decode():
            damaged = hashlib.sha1(content, usedforsecurity=False).hexdigest()  # SHA-1, the only hash that a script in Redis can compute
            (states,) = self._call(tenant, "quarantine", {"sha256": sha256.decode(), "damaged": damaged, "kept_s": _DAMAGED_S})
            self.ended["damaged"] += states
            self.damaged_blobs += states > 0
            raise refusals.gone(state, "damaged")
        return bytes(content)

    def page(self, tenant: str, wanted: Filter) -> list[StateRecord]:
        found: list[StateRecord] = []
        arguments = {**wanted._asdict(), "scan": _SCAN}
        while True:
            further, rows = self._call(tenant, "page", {**arguments, "limit": wanted.limit - len(found)})
            found += map(_record, rows)
            if not further:
                return found
            arguments |= {"after": None, "seq": further.decode()}

    def change(
        self, tenant: str, state: str, patch: Patch, *, name: NameChange | None = None, guard: NameChange | None = None
    ) -> StateRecord:
        expires = None if patch.expires is None else "" if math.isinf(patch.expires) else repr(patch.expires)
        metadata = None if patch.metadata is None else orjson.dumps(patch.metadata).decode()
        pinned = None if patch.pinned is None else _flag(patch.pinned)
        arguments = {"expires": expires, "metadata": metadata, "pinned": pinned, "change": _change(name), "guard": _change(guard)}
        return _record(self._call(tenant, "change", {"id": state, **arguments})[0])

    def delete(self, tenant: str, state: str, guard: NameChange | None = None) -> None:
        self._call(tenant, "delete", {"id": state, "guard": _change(guard)})
        self.ended["deleted"] += 1

    def lineage(self, tenant: str, state: str, most: int | None = None) -> list[Ancestor]:
        line: list[Ancestor] = []
        while state and (most is None or len(line) < most):
            scan = _SCAN if most is None else min(_SCAN, most - len(line))
            parent, rows = self._call(tenant, "lineage", {"id": state, "first": not line, "scan": scan})
            line += [Ancestor(_record(fields), ids) for fields, ids in rows]
            state = parent.decode()
        return line

    def children(self, tenant: str, state: str, limit: int) -> list[StateRecord]:
        return [_record(row) for row in self._call(tenant, "children", {"id": state, "limit": limit})[0]]

    # Names and idempotency keys --------------------------------------------------------------------------------------------------------

    def name(self, tenant: str, name: str) -> Name:
        state, version = self._call(tenant, "name", {"name": name})
        return Name(name, state.decode(), version)

    def names(self, tenant: str, state: str) -> list[Name]:
        (found,) = self._call(tenant, "names", {"id": state})
        return sorted(Name(name.decode(), state, version) for name, version in found)

    def move(self, tenant: str, change: NameChange, state: str) -> Name:
        (version,) = self._call(tenant, "move", {"id": state, "change": _change(change)})
        return Name(change.name, state, version)

    def unname(self, tenant: str, change: NameChange) -> None:
        self._call(tenant, "unname", {"name": change.name, "change": _change(change)})

    def answered(self, tenant: str, key: IdempotencyKey) -> StateRecord | None:
        found = self._call(tenant, "answered", {"key": self._key(key)})[0]
        return _record(found) if found else None

    def usage(self, tenant: str) -> Usage:
        with failing():
            return Usage(*(int(each or 0) for each in self._redis.hmget(_prefix(tenant) + "usage", Usage._fields)))

    def totals(self) -> Usage:
        tenants = self._tenants()
        with failing():
            asked = self._redis.pipeline(transaction=False)
            for tenant in tenants:
                asked.hmget(_prefix(tenant) + "usage", Usage._fields)
            sums = (sum(int(each or 0) for each in column) for column in zip((0, 0, 0), *asked.execute(), strict=True))
            return Usage(*sums)

    def blobs(self) -> Iterator[StoredBlob]:
        with failing():
            keys = sorted(set(self._redis.scan_iter(match="attnserve:{*}:sharing:*", count=1000)))
        for key in keys:
            prefix, _, sha256 = key.decode().rpartition("sharing:")
            with failing():
                states, content = self._redis.scard(key), self._redis.get(f"{prefix}blob:{sha256}")
            if states:  # 0 if the states were deleted after the scan
                yield StoredBlob(sha256, content or b"", states)

    # Documents -------------------------------------------------------------------------------------------------------------------------

    def write(self, document: Document, expected: int | None, quota: Quota) -> int:
        return self.write_all([(document, expected)], quota)[0]

    def write_all(self, documents: Sequence[tuple[Document, int | None]], quota: Quota) -> list[int]:
        given = [
            {"kind": each.kind, "id": each.id, "due": _time(each.due), "expires": _time(each.expires)}
            | ({} if expected is None else {"expected": expected})
            for each, expected in documents
        ]
        arguments = {"documents": given, "quota": quota._asdict()}
        evicted, versions = self._call(documents[0][0].tenant, "write", arguments, *(each.body for each, _ in documents))
        self.ended["evicted"] += evicted
        return [int(version) for version in versions]

    def read(self, tenant: str, kind: str, id: str) -> Document:
        return _document(tenant, kind, id, self._call(tenant, "read", {"kind": kind, "id": id})[0])

    def erase(self, tenant: str, kind: str, id: str, expected: int | None) -> None:
        self._call(tenant, "erase", {"kind": kind, "id": id, "expected": expected})

    def documents(self, tenant: str, kind: str, after: str | None, limit: int) -> list[Document]:
        (found,) = self._call(tenant, "documents", {"kind": kind, "after": after, "limit": limit})
        return [_document(tenant, kind, id.decode(), row) for id, row in found]

    def due(self, kind: str, now: float, limit: int) -> list[Document]:
        tenants = self._tenants()
        with failing():
            asked = self._redis.pipeline(transaction=False)
            for tenant in tenants:
                asked.zrangebyscore(f"{_prefix(tenant)}due:{kind}", "-inf", repr(now), start=0, num=limit, withscores=True)
            replies = asked.execute()
        rows = sorted((at, tenant, id.decode()) for tenant, reply in zip(tenants, replies, strict=True) for id, at in reply)
        found: list[Document] = []
        for _, tenant, id in rows:
            try:
                document = self.read(tenant, kind, id)
            except StateNotFound:
                continue  # the document has expired, or was erased meanwhile
            if document.due is not None and document.due <= now:
                found.append(document)
            if len(found) == limit:
                break
        return found

    def sweep(self) -> bool:
        now, left = self._clock(), SWEPT
        self._unswept = self._unswept or self._tenants()
        for _ in range(_SCAN):
            if not (self._unswept and left):
                break
            arguments = {"keys_until": repr(now - _KEY_S), "gone_until": repr(now - _TOMBSTONE_S), "most": left}
            expired, left = self._call(self._unswept[-1], "sweep", arguments)
            self.ended["expired"] += expired
            if left:
                self._unswept.pop()
        return bool(self._unswept)

    # Calls -----------------------------------------------------------------------------------------------------------------------------

    def _call(self, tenant: str, call: str, arguments: dict[str, Any], *content: bytes) -> _Reply:
        """Run a call of the script, and return its reply. `arguments` that are None are omitted. Raises the error of a refused call."""
        given = {name: value for name, value in arguments.items() if value is not None}
        keys, now = [_prefix(tenant) + "usage"], repr(self._clock())
        with failing():
            reply: _Reply = self._script(keys, [call, now, orjson.dumps(given), *content])
            if reply[0] == b"register":
                self._redis.sadd(_TENANTS, tenant)
                reply = self._script(keys, [call, now, orjson.dumps({**given, "tenant": tenant}), *content])
        if reply[0] == b"refused":
            raise _refusal(reply[1].decode(), [each.decode() if isinstance(each, bytes) else each for each in reply[2:]], given)
        return reply[1:]

    def _tenants(self) -> list[str]:
        with failing():
            return sorted(each.decode() for each in self._redis.smembers(_TENANTS))

    def _key(self, key: IdempotencyKey | None) -> dict[str, Any] | None:
        return None if key is None else {**key._asdict(), "since": self._clock() - _KEY_S}


def _prefix(tenant: str) -> str:
    """Return the prefix of a tenant's keys. It has a hash of the tenant's name, because the name may contain braces."""
    return f"attnserve:{{{hashlib.sha256(tenant.encode()).hexdigest()[:32]}}}:"


def _refusal(why: str, details: list[Any], given: dict[str, Any]) -> Exception:
    """Return the error for a call that the script refused. `given` has the call's arguments."""
    match why:
        case "no_state":
            return refusals.no_state(details[0])
        case "gone":
            return refusals.gone(details[0], details[1])
        case "no_name":
            return refusals.no_name(given["name"])
        case "name_moved":
            return refusals.name_moved(NameChange(details[1], details[2]), details[0])
        case "key_reused":
            return refusals.key_reused(IdempotencyKey(details[0], ""))
        case "over_quota":
            return refusals.over_quota(Usage(*details), Quota(**given["quota"]))
        case "no_page":
            return refusals.no_page(details[0], details[1])
        case "no_document":
            return refusals.no_document(given["kind"], given["id"])
        case "document_moved":
            return refusals.document_moved(*details)
    return StoreFailed(f"the store of states refused a call: {why}")


def _record(fields: _Reply) -> StateRecord:
    row: dict[str, Any] = {name.decode(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}
    row = {name: value.decode() if isinstance(value, bytes) else value for name, value in row.items()}
    del row["seq"]
    numbers = {"position": int, "size": int, "created": float, "used": float}
    row |= {name: read(row[name]) for name, read in numbers.items()}
    row |= {"parent": row["parent"] or None, "expires": _read_time(row["expires"]), "pinned": row["pinned"] == "1"}
    return StateRecord(**{**row, "metadata": orjson.loads(row["metadata"])})


def _document(tenant: str, kind: str, id: str, row: _Reply) -> Document:
    body, version, due, expires = row
    return Document(
        kind=kind,
        id=id,
        tenant=tenant,
        body=body,
        version=int(version),
        due=_read_time(due.decode()),
        expires=_read_time(expires.decode()),
    )


def _given(record: StateRecord, key: dict[str, Any] | None) -> dict[str, Any]:
    fields = {each: str(getattr(record, each)) for each in ("id", "tenant", "model", "fingerprint", "numerics", "position", "origin")}
    fields |= {"created": repr(record.created), "used": repr(record.used), "expires": _time(record.expires)}
    fields |= {"parent": record.parent or "", "turn": record.turn, "metadata": orjson.dumps(record.metadata).decode()}
    return {"record": fields, "pinned": _flag(record.pinned)} | ({} if key is None else {"key": key})


def _change(change: NameChange | None) -> dict[str, Any] | None:
    return None if change is None else {name: value for name, value in change._asdict().items() if value is not None}


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _time(value: float | None) -> str:
    return "" if value is None else repr(value)


def _read_time(value: str) -> float | None:
    return float(value) if value else None
