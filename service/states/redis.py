"""The store in Redis, for services on several machines. `redis.lua` has the few functions that Redis carries out at one moment.

The changes of a call that has returned survive kill -9 of this process; docs/states.md says which changes are lost if Redis fails. If one
call of a group fails, the others are not undone. After StoreFailed it is unknown whether the call was carried out, so read before you write
again.

All keys of a tenant have the same hash tag, so they are on one node of a cluster:

| key, after `attnserve:{hash of the tenant}:` | content |
|---|---|
| usage | hash: the fields of `Tenant` in `backend.py` except the numbers of rows, and the tenant. `version` grows with every commit |
| state:ID, ids:ID | a hash with the state's record; the state's token ids |
| blob:SHA256, sharing:SHA256, pins:SHA256 | the bytes; the states that share the bytes; the pinned ones among these states |
| damaged:SHA256, staged:ID | damaged bytes, for a week; the bytes of a state that is being written |
| ready, lru, end | ready states by sequence number; unpinned states by time of use; states by time of expiry |
| gone | states that are gone, by the time of their end |
| kin | for each parent the number of rows that name it |
| names, named:ID | a hash with the version and the state of each name; the names of a state |
| key:KEY, keys | an idempotency key; all idempotency keys by their age |
| doc:KIND:ID | a hash with a document |
| docs:KIND, due:KIND, docs_end | documents by sequence number; by the time at which they are due; by time of expiry |

`attnserve:tenants` has all tenants. A sweep asks for each tenant: an index over all tenants would be on another node of the cluster than a
tenant's keys. Earlier releases had the same keys and `children:ID`: version 1 without a version in `usage`, version 2 without counting
metadata, token ids and rows of documents. The first start of this release counts them and marks such a store as version 3. Earlier
releases refuse it, because they would not count.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from service.errors import StoreFailed
from service.states.backend import Changes, KeptKey, Key, Meta, Sharing, Tenant
from service.states.engine import StateEngine
from service.states.record import DOCUMENT_BYTES, Ancestor, Document, Fork, Name, NameChange, Quota, StateRecord, StoredBlob, Usage
from service.states.redis_client import connected, failing
from service.states.rows import Rows, row_size

_DAMAGED_S = 604_800  # seconds for which damaged bytes are kept for analysis
_STAGED_S = 600  # seconds for which the bytes of a state are kept whose writer was killed
_TENANTS = "attnserve:tenants"
_VERSION_KEY, _OLD, _VERSION = "attnserve:version", (b"1", b"2"), b"3"
_SCRIPT = Path(__file__).with_name("redis.lua").read_text("utf-8")


class RedisEngine(StateEngine):
    """The backend in Redis. Use it on one thread. If Redis is not reachable, calls raise StoreFailed. Later calls connect again."""

    def __init__(self, url: str, *, password: str | None = None, clock: Callable[[], float] = time.time) -> None:
        """`url`: redis://[USER@]HOST:PORT/DB, or rediss:// for TLS. Raises StoreFailed if Redis does not answer or may evict keys."""
        super().__init__(clock)
        self._staged = ""  # end of the key of the bytes that are being written
        self._redis = connected(url, password)
        with failing():
            self._script = self._redis.register_script(_SCRIPT)
            version = _VERSION if self._redis.set(_VERSION_KEY, _VERSION, nx=True) else self._redis.get(_VERSION_KEY)
            if version in _OLD:
                for tenant in self._tenants():
                    self._recount(tenant)
                self._redis.set(_VERSION_KEY, version := _VERSION)
        if version != _VERSION:
            raise StoreFailed(f"the store in Redis has version {version!r}, and this release reads {_VERSION!r}: use another database")

    def _recount(self, tenant: str) -> None:
        """Count the bytes of a tenant, of which earlier versions counted less."""

        def recount(rows: Rows) -> None:
            ready = list(self._newest(tenant, "ready", math.inf, 200))
            gone = [self._row(tenant, "state", id) for id in _texts(self._redis.zrange(_prefix(tenant) + "gone", 0, -1))]
            bodies = set(self._redis.scan_iter(match=f"{_prefix(tenant)}doc:*", count=1000))
            size = sum({each.sha256: each.size for each in ready}.values()) + sum(map(row_size, ready))
            size += sum(DOCUMENT_BYTES + self._redis.hstrlen(key, "body") for key in bodies)
            rows.after["tenant",] = rows.usage._replace(size=size, gone_size=sum(map(row_size, gone)))

        self._change(tenant, recount)
        for key in set(self._redis.scan_iter(match=f"{_prefix(tenant)}children:*", count=1000)):  # an index that is no longer used
            self._redis.delete(key)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Return a context without an effect: each call in it is durable by itself, even if a later call fails."""
        yield

    spare = group

    def trouble(self) -> None:
        """Return None: if Redis is away or full, its calls fail, and the next ones try again."""

    def close(self) -> None:
        self._redis.close()

    # Reads -----------------------------------------------------------------------------------------------------------------------------

    def rows(self, tenant: str, keys: Sequence[Key]) -> list[Any]:
        if not keys:
            return []
        found = self._call(tenant, "rows", *(":".join(key) if key[1:] else f"{key[0]}:" for key in keys))
        return [_row(key, row) for key, row in zip(keys, found, strict=True)]

    def newest(self, tenant: str, index: str, below: float, limit: int) -> list[str]:
        with failing():
            return _texts(self._redis.zrevrangebyscore(_prefix(tenant) + index, f"({below!r}", "-inf", start=0, num=limit))

    def oldest(self, tenant: str, index: str, skip: int, limit: int) -> list[str]:
        with failing():
            return _texts(self._redis.zrange(_prefix(tenant) + index, skip, skip + limit - 1))

    def sharing(self, tenant: str, sha256: str) -> list[str]:
        with failing():
            return _texts(self._redis.smembers(f"{_prefix(tenant)}sharing:{sha256}"))

    def timed(self, index: str, until: float, limit: int) -> list[tuple[str, str]]:
        tenants = self._tenants()
        with failing():
            asked = self._redis.pipeline(transaction=False)
            for tenant in tenants:
                asked.zrangebyscore(_prefix(tenant) + index, "-inf", repr(until), start=0, num=limit, withscores=True)
            replies = asked.execute()
        rows = sorted((at, tenant, member.decode()) for tenant, reply in zip(tenants, replies, strict=True) for member, at in reply)
        return [(tenant, member) for _, tenant, member in rows[:limit]]

    def line(self, tenant: str, state: str, most: int) -> list[Ancestor]:
        return [Ancestor(_record(row), ids) for row, ids in self._call(tenant, "line", state, most)]

    def content(self, tenant: str, record: StateRecord) -> bytes:
        with failing():
            return bytes(self._redis.get(f"{_prefix(tenant)}blob:{record.sha256}") or b"")

    def totals(self) -> Usage:
        found = [self.usage(tenant) for tenant in self._tenants()]
        return Usage(*(sum(column) for column in zip((0, 0, 0), *found, strict=True)))

    def blobs(self) -> Iterator[StoredBlob]:
        with failing():
            keys = sorted(set(self._redis.scan_iter(match="attnserve:{*}:sharing:*", count=1000)))
        for key in keys:
            prefix, _, sha256 = key.decode().rpartition("sharing:")
            with failing():
                states, content = self._redis.scard(key), self._redis.get(f"{prefix}blob:{sha256}")
            if states:  # 0 if the states were deleted after the scan
                yield StoredBlob(sha256, content or b"", states)

    # Changes ---------------------------------------------------------------------------------------------------------------------------

    def _add(self, forks: Sequence[Fork], quota: Quota, blob: bytes | None, ids: bytes, name: NameChange | None) -> list[StateRecord]:
        """Send the bytes once, before the transaction. Its commit only renames their key: if it had to send them, it would be slow, and
        another process would always be faster."""
        if blob is None:
            return super()._add(forks, quota, None, ids, name)
        self._staged = f"staged:{uuid4().hex}"
        staged = _prefix(forks[0].record.tenant) + self._staged
        with failing():
            self._redis.set(staged, blob, ex=_STAGED_S)
        try:
            return super()._add(forks, quota, blob, ids, name)
        finally:
            with failing():
                self._redis.delete(staged)

    def touch(self, tenant: str, state: str, now: float) -> None:
        self._call(tenant, "touch", state, repr(now))

    def commit(self, changes: Changes) -> bool:
        words = [word for command in self._commands(changes) for word in (len(command), *command)]
        return bool(self._call(changes.tenant, "commit", changes.before["tenant",].version, int(changes.frees), *words))

    def _commands(self, changes: Changes) -> Iterator[tuple[Any, ...]]:
        """Yield the commands of Redis for the changes of a transaction, with keys without the prefix."""
        usage = changes.after.get(("tenant",), changes.before["tenant",])
        seq, prefix = usage.seq, _prefix(changes.tenant)
        if changes.after and not usage.registered:
            with failing():
                self._redis.sadd(_TENANTS, changes.tenant)
            yield "HSET", "usage", "tenant", changes.tenant
        for key, new in changes.after.items():
            old = changes.before[key]
            if isinstance(new, StateRecord | Document) and not new.seq:
                seq += 1
                new = replace(new, seq=seq)
            match key:
                case ("state", id):
                    yield from _state_commands(id, old, new, changes.ids.get(id))
                case ("sharing", sha256) if sha256 in changes.content:  # also if there are states that share it: it may be missing
                    yield "RENAMENX", self._staged, f"{prefix}blob:{sha256}"
                    yield "PERSIST", f"blob:{sha256}"
                case ("sharing", sha256) if old.states and not new.states:
                    if changes.apart.get(sha256):
                        yield "SET", f"damaged:{sha256}", changes.apart[sha256], "EX", _DAMAGED_S
                    yield "DEL", f"blob:{sha256}"
                case ("name", name):
                    yield ("HDEL", "names", name) if new is None else ("HSET", "names", name, f"{new.version}:{new.state}")
                case ("key", name):
                    yield from _hash_commands(f"key:{name}", None if new is None else new._asdict())
                case ("document", kind, id):
                    yield from _hash_commands(f"doc:{kind}:{id}", None if new is None else _document(new))
            yield from _index_commands(_indexes(key, old), _indexes(key, new))
        if changes.after:
            counted = usage._replace(seq=seq)._asdict()
            yield from _hash_commands("usage", {field: counted[field] for field in _COUNTED})

    def _call(self, tenant: str, function: str, *arguments: Any) -> Any:
        with failing():
            return self._script([_prefix(tenant) + "usage"], [function, *arguments])

    def _tenants(self) -> list[str]:
        with failing():
            return sorted(_texts(self._redis.smembers(_TENANTS)))


_COUNTED = ("states", "size", "pinned_size", "version_floor", "gone_size", "seq")
_FOLLOWS = ("version", "names", "keys", "gone")  # fields of the tenant's row that the script adds
_STORED = [field.name for field in fields(StateRecord) if field.name not in ("shared_by", "ids_size")]


def _prefix(tenant: str) -> str:
    """Return the prefix of a tenant's keys. It has a hash of the tenant's name, because the name may contain braces."""
    return f"attnserve:{{{hashlib.sha256(tenant.encode()).hexdigest()[:32]}}}:"


# From rows to commands -----------------------------------------------------------------------------------------------------------------


def _state_commands(id: str, old: StateRecord | None, new: StateRecord | None, ids: bytes | None) -> Iterator[tuple[Any, ...]]:
    before, after = ({} if each is None else _state(each) for each in (old, new))
    if new is None or old is None:
        by, parent = (1, new.parent) if new is not None else (-1, old.parent if old is not None else None)
        if parent:
            yield "HINCRBY", "kin", parent, by
    if ids is not None or new is None:
        yield ("SET", f"ids:{id}", ids) if ids else ("DEL", f"ids:{id}")
    changed = {field: value for field, value in after.items() if before.get(field) != value}
    if changed or new is None:
        yield from _hash_commands(f"state:{id}", None if new is None else changed)


def _hash_commands(key: str, row: dict[str, Any] | None) -> Iterator[tuple[Any, ...]]:
    yield ("DEL", key) if row is None else ("HSET", key, *(part for pair in row.items() for part in pair))


def _state(record: StateRecord) -> dict[str, Any]:
    row = {field: getattr(record, field) for field in _STORED}
    texts = {field: _time(row[field]) for field in ("created", "used", "expires")}
    return row | texts | {"parent": record.parent or "", "pinned": int(record.pinned), "metadata": orjson.dumps(record.metadata).decode()}


def _document(document: Document) -> dict[str, Any]:
    times = {"due": _time(document.due), "expires": _time(document.expires)}
    return {"body": document.body, "version": document.version, **times}


def _indexes(key: Key, row: Any) -> dict[tuple[str, str], float | None]:
    """Return the indexes that have a row, with the row's member and its score; None in a set."""
    found: dict[tuple[str, str], float | None] = {}
    match key, row:
        case ("state", id), StateRecord(status="ready"):
            found = {("ready", id): row.seq, (f"sharing:{row.sha256}", id): None}
            found |= {(f"pins:{row.sha256}", id): None} if row.pinned else {("lru", id): row.used}
            found |= {} if row.expires is None else {("end", id): row.expires}
        case ("state", id), StateRecord():
            found = {("gone", id): row.used}
        case ("name", name), Name():
            found = {(f"named:{row.state}", name): None}
        case ("key", name), KeptKey():
            found = {("keys", name): row.created}
        case ("document", kind, id), Meta() | Document():
            found = {(f"docs:{kind}", id): row.seq}
            found |= {} if row.due is None else {(f"due:{kind}", id): row.due}
            found |= {} if row.expires is None else {("docs_end", f"{kind}:{id}"): row.expires}
    return found


def _index_commands(old: dict[tuple[str, str], float | None], new: dict[tuple[str, str], float | None]) -> Iterator[tuple[Any, ...]]:
    for (index, member), score in old.items():
        if (index, member) not in new:
            yield "SREM" if score is None else "ZREM", index, member
    for (index, member), score in new.items():
        if score is None:
            yield "SADD", index, member
        elif old.get((index, member)) != score:
            yield "ZADD", index, repr(score), member


# From replies to rows ------------------------------------------------------------------------------------------------------------------


def _row(key: Key, reply: Any) -> Any:
    match key[0]:
        case "tenant":
            found = _pairs(reply)
            return Tenant(**{field: int(found.get(field, 0)) for field in (*_COUNTED, *_FOLLOWS)}, registered="tenant" in found)
        case "state":
            return _record(reply) if reply else None
        case "sharing":
            return Sharing(*reply)
        case "kin":
            return int(reply or 0)
        case "named":
            return sorted(_texts(reply))
        case "name" if reply is not None:
            version, state = reply.decode().split(":", 1)
            return Name(key[1], state, int(version))
        case "key" if reply[0] is not None:
            return KeptKey(reply[0].decode(), reply[1].decode(), float(reply[2]))
        case "document" if reply[0] is not None:
            version, size, due, expires, seq = reply
            return Meta(int(version), size, _read_time(due), _read_time(expires), int(float(seq)))
    return reply if key[0] == "body" else None


def _record(reply: Any) -> StateRecord:
    row: dict[str, Any] = _pairs(reply)
    numbers = {"position": int, "size": int, "ids_size": int, "seq": int, "created": float, "used": float}
    row |= {name: read(row[name]) for name, read in numbers.items()}
    row |= {"parent": row["parent"] or None, "expires": _read_time(row["expires"]), "pinned": row["pinned"] == "1"}
    return StateRecord(**{**row, "metadata": orjson.loads(row["metadata"])})


def _pairs(reply: Sequence[Any]) -> dict[str, Any]:
    texts = [each.decode() if isinstance(each, bytes) else each for each in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _texts(reply: Any) -> list[str]:
    return [each.decode() for each in reply]


def _time(value: float | None) -> str:
    return "" if value is None else repr(value)


def _read_time(value: str | bytes) -> float | None:
    return float(value) if value else None
