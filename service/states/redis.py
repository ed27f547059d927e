"""The store in Redis, for services on several machines. Its calls are one script, redis_states.lua and redis_documents.lua.

A call runs in the script, so it is atomic; calls of a group are not undone together. A call that has returned survives kill -9 of this
process. It survives power loss of Redis only with `appendfsync always`: `everysec` loses up to a second of calls, and no append-only file
loses all. After StoreFailed it is unknown whether the call was carried out: read before writing again.

All keys of a tenant have the same hash tag, so they are on one node of a cluster:

| key, after `attnserve:{hash of the tenant}:` | content |
|---|---|
| usage | hash: states, size, pinned_size, the last sequence number, the tenant |
| state:ID, ids:ID | hash: the record; its tokens |
| blob:SHA256, sharing:SHA256, pins:SHA256 | the bytes; the states that share them, and those of them that are pinned |
| damaged:SHA256 | damaged bytes, for a week |
| ready, lru, end, gone | states by sequence number; unpinned ones by use; those that expire; those that are gone, by when |
| children:ID, kin | the states made from one; how many rows name each parent |
| names, named:ID | hash: the version and state of each name; the names of a state |
| key:KEY, keys | an idempotency key; their ages |
| doc:KIND:ID, docs:KIND, due:KIND, docs_end | hash: a document; documents by sequence number, by when they are due, by when they expire |

`attnserve:tenants` has all tenants: a sweep asks each. An index over all tenants could not change in one script with a tenant's keys.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from service.errors import StateNotFound, StoreFailed
from service.states import refusals
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

_KEY_S = 86_400.0  # as in sqlite.py
_TOMBSTONE_S = 86_400.0
_DAMAGED_S = 604_800  # seconds for which damaged bytes are kept for analysis
_TENANTS = "attnserve:tenants"
_VERSION_KEY, _VERSION = "attnserve:version", b"1"
_CONNECT_S, _ANSWER_S = 2.0, 10.0
_SCAN = 200  # rows that one script looks at: other clients wait for it
_SCRIPT = ("redis_states.lua", "redis_documents.lua")
_Reply = list[Any]


class RedisEngine:
    """See `StateEngine`. Used on one thread. Connects again by itself after Redis was away: calls meanwhile raise StoreFailed at once."""

    group_size = 1  # calls of a group are durable one by one
    failures: tuple[type[Exception], ...] = ()

    def __init__(self, url: str, *, password: str | None = None, clock: Callable[[], float] = time.time) -> None:
        """`url`: redis://[USER@]HOST:PORT/DB, or rediss:// for TLS. Raises StoreFailed if that Redis does not answer or may evict keys."""
        self._clock = clock
        self.ended: Counter[Status] = Counter()
        self.damaged_blobs = 0
        try:
            self._redis = _client(url, password)
        except ValueError:  # its message may quote the password
            raise StoreFailed("the URL of the store of states is invalid: expected redis://[USER@]HOST:PORT/DB or rediss://") from None
        with _failing():
            self._script = self._redis.register_script("".join(Path(__file__).with_name(part).read_text("utf-8") for part in _SCRIPT))
            version = _VERSION if self._redis.set(_VERSION_KEY, _VERSION, nx=True) else self._redis.get(_VERSION_KEY)
            memory = self._redis.info("memory")
        if version != _VERSION:
            raise StoreFailed(f"the store in Redis has version {version!r}, and this release reads {_VERSION!r}: use another database")
        if memory.get("maxmemory") and memory.get("maxmemory_policy") != "noeviction":
            raise StoreFailed(f"Redis may evict states: set maxmemory-policy to noeviction; it is {memory.get('maxmemory_policy')}")

    @contextmanager
    def group(self) -> Iterator[None]:
        """Each call inside is durable by itself, also if a later one fails."""
        yield

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
        fields = {each: str(getattr(record, each)) for each in ("id", "tenant", "model", "fingerprint", "numerics", "position", "origin")}
        fields |= {"created": repr(record.created), "used": repr(record.used), "expires": _time(record.expires)}
        fields |= {"parent": record.parent or "", "turn": record.turn, "metadata": orjson.dumps(record.metadata).decode()}
        arguments: dict[str, Any] = {
            "record": fields,
            "pinned": _flag(record.pinned),
            "quota": quota._asdict(),
            "change": _change(name),
            "key": self._key(key),
        }
        if blob is not None:
            arguments |= {"sha256": hashlib.sha256(blob).hexdigest(), "size": len(blob)}
        found, evicted = self._call(record.tenant, "put", arguments, ids, *(() if blob is None else (blob,)))
        self.ended["evicted"] += evicted
        return _record(found)

    def get(self, tenant: str, state: str) -> StateRecord:
        return _record(self._call(tenant, "get", {"id": state})[0])

    def use(self, tenant: str, state: str) -> StateRecord:
        return _record(self._call(tenant, "use", {"id": state})[0])

    def blob(self, tenant: str, state: str) -> bytes:
        sha256, content = self._call(tenant, "blob", {"id": state})
        if hashlib.sha256(content).hexdigest() != sha256.decode():
            damaged = hashlib.sha1(content, usedforsecurity=False).hexdigest()  # the one hash that a script can compute
            (states,) = self._call(tenant, "quarantine", {"sha256": sha256.decode(), "damaged": damaged, "kept_s": _DAMAGED_S})
            self.ended["damaged"] += states
            self.damaged_blobs += states > 0
            raise refusals.gone(state, "damaged")
        return bytes(content)

    def page(self, tenant: str, wanted: Filter) -> list[StateRecord]:
        found: list[StateRecord] = []
        arguments = {"name": wanted.name, "model": wanted.model, "metadata": wanted.metadata, "after": wanted.after, "scan": _SCAN}
        while True:
            further, rows = self._call(tenant, "page", {**arguments, "limit": wanted.limit - len(found)})
            found += map(_record, rows)
            if not further:
                return found
            arguments |= {"after": None, "seq": further.decode()}

    def change(self, tenant: str, state: str, patch: Patch) -> StateRecord:
        expires = None if patch.expires is None else "" if math.isinf(patch.expires) else repr(patch.expires)
        metadata = None if patch.metadata is None else orjson.dumps(patch.metadata).decode()
        pinned = None if patch.pinned is None else _flag(patch.pinned)
        return _record(self._call(tenant, "change", {"id": state, "expires": expires, "metadata": metadata, "pinned": pinned})[0])

    def delete(self, tenant: str, state: str) -> None:
        self._call(tenant, "delete", {"id": state})
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
        with _failing():
            return Usage(*(int(each or 0) for each in self._redis.hmget(_prefix(tenant) + "usage", Usage._fields)))

    def totals(self) -> Usage:
        tenants = self._tenants()
        with _failing():
            asked = self._redis.pipeline(transaction=False)
            for tenant in tenants:
                asked.hmget(_prefix(tenant) + "usage", Usage._fields)
            sums = (sum(int(each or 0) for each in column) for column in zip((0, 0, 0), *asked.execute(), strict=True))
            return Usage(*sums)

    def blobs(self) -> Iterator[StoredBlob]:
        with _failing():
            keys = sorted(set(self._redis.scan_iter(match="attnserve:{*}:sharing:*", count=1000)))
        for key in keys:
            prefix, _, sha256 = key.decode().rpartition("sharing:")
            with _failing():
                states, content = self._redis.scard(key), self._redis.get(f"{prefix}blob:{sha256}")
            if states:  # else they were forgotten meanwhile
                yield StoredBlob(sha256, content or b"", states)

    # Documents -------------------------------------------------------------------------------------------------------------------------

    def write(self, document: Document, expected: int | None, quota: Quota) -> int:
        arguments: dict[str, Any] = {"kind": document.kind, "id": document.id, "expected": expected, "quota": quota._asdict()}
        arguments |= {"due": _time(document.due), "expires": _time(document.expires)}
        version, evicted = self._call(document.tenant, "write", arguments, document.body)
        self.ended["evicted"] += evicted
        return int(version)

    def read(self, tenant: str, kind: str, id: str) -> Document:
        return _document(tenant, kind, id, self._call(tenant, "read", {"kind": kind, "id": id})[0])

    def erase(self, tenant: str, kind: str, id: str, expected: int | None) -> None:
        self._call(tenant, "erase", {"kind": kind, "id": id, "expected": expected})

    def documents(self, tenant: str, kind: str, after: str | None, limit: int) -> list[Document]:
        (found,) = self._call(tenant, "documents", {"kind": kind, "after": after, "limit": limit})
        return [_document(tenant, kind, id.decode(), row) for id, row in found]

    def due(self, kind: str, now: float, limit: int) -> list[Document]:
        tenants = self._tenants()
        with _failing():
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
                continue  # it has expired, or was erased meanwhile
            if document.due is not None and document.due <= now:
                found.append(document)
            if len(found) == limit:
                break
        return found

    def sweep(self) -> int:
        now, expired = self._clock(), 0
        arguments = {"keys_until": repr(now - _KEY_S), "gone_until": repr(now - _TOMBSTONE_S), "most": _SCAN}
        for tenant in self._tenants():
            more = 1
            while more:
                states, more = self._call(tenant, "sweep", arguments)
                expired += states
        self.ended["expired"] += expired
        return expired

    # Calls -----------------------------------------------------------------------------------------------------------------------------

    def _call(self, tenant: str, call: str, arguments: dict[str, Any], *content: bytes) -> _Reply:
        """Run a call of the script. `arguments` that are None are left out."""
        given = {name: value for name, value in arguments.items() if value is not None}
        keys, now = [_prefix(tenant) + "usage"], repr(self._clock())
        with _failing():
            reply: _Reply = self._script(keys, [call, now, orjson.dumps(given), *content])
            if reply[0] == b"register":
                self._redis.sadd(_TENANTS, tenant)
                reply = self._script(keys, [call, now, orjson.dumps({**given, "tenant": tenant}), *content])
        if reply[0] == b"refused":
            raise _refusal(reply[1].decode(), [each.decode() if isinstance(each, bytes) else each for each in reply[2:]], given)
        return reply[1:]

    def _tenants(self) -> list[str]:
        with _failing():
            return sorted(each.decode() for each in self._redis.smembers(_TENANTS))

    def _key(self, key: IdempotencyKey | None) -> dict[str, Any] | None:
        return None if key is None else {**key._asdict(), "since": self._clock() - _KEY_S}


def _client(url: str, password: str | None) -> Any:
    """A client of one Redis or of a cluster. Any: its types are those of the asynchronous client too."""
    # No second attempt: a call that was sent may have been carried out.
    options: dict[str, Any] = {"socket_connect_timeout": _CONNECT_S, "socket_timeout": _ANSWER_S, "socket_keepalive": True, "protocol": 2}
    options |= {"retry": Retry(NoBackoff(), 0)} | ({} if password is None else {"password": password})
    client = redis.Redis.from_url(url, **options)
    with _failing():
        clustered: Any = client.info("cluster")
        if not clustered.get("cluster_enabled"):
            return client
        client.close()
        return redis.RedisCluster.from_url(url, **options)


@contextmanager
def _failing() -> Iterator[None]:
    """Errors of Redis and of the connection become StoreFailed."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise StoreFailed(f"the store of states failed: {type(error).__name__}: {reason}; send the request again later") from error


def _prefix(tenant: str) -> str:
    """What the keys of a tenant begin with. Hashed, because a tenant's name may have braces."""
    return f"attnserve:{{{hashlib.sha256(tenant.encode()).hexdigest()[:32]}}}:"


def _refusal(why: str, details: list[Any], given: dict[str, Any]) -> Exception:
    """The error for a refused call with these arguments."""
    match why:
        case "no_state":
            return refusals.no_state(details[0])
        case "gone":
            return refusals.gone(details[0], details[1])
        case "no_name":
            return refusals.no_name(given["name"])
        case "name_moved":
            return refusals.name_moved(NameChange(**given["change"]), details[0])
        case "key_reused":
            return refusals.key_reused(IdempotencyKey(given["key"]["key"], given["key"]["digest"]))
        case "over_quota":
            return refusals.over_quota(Usage(*details), Quota(**given["quota"]))
        case "no_page":
            return refusals.no_page(details[0], details[1])
        case "no_document":
            return refusals.no_document(given["kind"], given["id"])
        case "document_moved":
            return refusals.document_moved(given["kind"], given["id"], details[0], given["expected"])
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


def _change(change: NameChange | None) -> dict[str, Any] | None:
    return None if change is None else {name: value for name, value in change._asdict().items() if value is not None}


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _time(value: float | None) -> str:
    return "" if value is None else repr(value)


def _read_time(value: str) -> float | None:
    return float(value) if value else None
