"""Writes the states after long prompts to the store, so that each generator process of profile `split` also finds the states of the others.

A state is found by tenant, salt and token ids (as in the prefix cache), the bundle's fingerprint and the machine's numerics. Reading or
writing a state takes about 1 ms, as long as feeding 30 tokens (docs/figures.md), but most prompts come only once. So a state is written
only if its prompt is at least `LEAST_TOKENS` tokens longer than the longest prefix of it whose state is in the store. A lookup is made only
if it can save at least as many tokens.

Each tenant has an index, which is one document, with up to `_MOST_STATES` states. The least recently used states are removed from it. A
process notes the uses of states in its own memory until it next writes the index.
"""

import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from service.errors import DocumentMoved, ServiceError, StateNotFound
from service.generation.saved.packing import Packing
from service.generation.saved.prefix_cache import Salt, hashes
from service.generation.saved.writer import NO_QUOTA, Writer
from service.generation.state import State
from service.states.blob import MOST_RECENT
from service.states.engine import StateEngine
from service.states.record import Document
from service.states.store import Store
from service.telemetry.metrics import Miss

LEAST_TOKENS = 1_024
_MOST_STATES = 512  # most states in the index of a tenant
_LIFE_S = 3_600.0  # seconds from the writing of a state until it expires
_MOST_WRITING = 4
_MOST_NOTED = 4_096  # most uses of states that are noted in memory
_ATTEMPTS = 3  # attempts to write an index, which other processes may change at the same time
_NEAREST: tuple[Miss, ...] = ("evicted", "numerics", "model")  # if several reasons apply, the first is reported
_INDEX, _STATE = "prefixes", "prefix"  # the kinds of the documents for the index and for states
_ROW = struct.Struct("<16s16s8s16sIIdd")


class _Entry(NamedTuple):
    """A state in the index. `content` is the hash of its tokens; `salt`, `model` and `numerics` are hashes too."""

    content: bytes
    salt: bytes
    model: bytes
    numerics: bytes
    length: int
    size: int
    written: float
    used: float

    @property
    def id(self) -> str:
        """Return the id of the state. Two states have the same id only if their tokens, salt, model and numerics are equal."""
        return f"state_{_hash(self.content, self.salt, self.model, self.numerics, size=16).hex()}"


@dataclass(frozen=True)
class Found:
    """The result of a lookup: the state after the first `length` tokens; or None, and in `miss` the reason if it is known."""

    state: State | None = None
    length: int = 0
    miss: Miss | None = None


class SharedPrefixes:
    """The shared states of one model. `find` is called on the event loop, `put` on the engine's thread."""

    def __init__(self, store: Store, packing: Packing, most_bytes: int, least: int = LEAST_TOKENS) -> None:
        """`most_bytes` limits the states of one tenant. `least` has the meaning of `LEAST_TOKENS`."""
        self._store = store
        self._packing = packing
        self._most_bytes = most_bytes
        self.least = least
        self._model = _hash(packing.fingerprint.encode(), size=8)
        self._numerics = _hash(packing.numerics.encode(), size=16)
        self._writer = Writer(store, _MOST_WRITING, "the state after a prompt")
        self._lock = threading.Lock()
        self._used: dict[tuple[str, str], float] = {}  # (tenant, id) -> time of the last use, if the index does not have it yet

    async def find(self, salt: Salt, tokens: Sequence[int], most: int, known: int) -> Found:
        """Return the state after the longest prefix of at most `most` tokens that is in the store, if the prefix has at least `known` +
        `least` tokens. The caller has the state after the first `known` tokens already. If the store fails, nothing is found.
        """

        def look(engine: StateEngine) -> Found:
            tenant = _apart(salt.tenant)
            rows = _read(engine, tenant)[0]
            lengths = sorted({row.length for row in rows if known + self.least <= row.length <= most})
            digests = dict(hashes(tokens, lengths))
            equal = [row for row in rows if row.salt == _salt(salt) and digests.get(row.length) == row.content]
            misses: set[Miss] = set()
            for row in sorted(equal, key=lambda row: row.length, reverse=True):
                if (why := self._foreign(row)) is not None:
                    misses.add(why)
                    continue
                try:
                    state = self._packing.unseal(engine.read(tenant, _STATE, row.id).body)
                except ServiceError:
                    misses.add("evicted")
                    continue
                last = tuple(tokens[max(row.length - MOST_RECENT, 0) : row.length])
                if state.recent[-len(last) :] == last:
                    self._note(tenant, row.id)
                    return Found(state, row.length)
            return Found(miss=next((miss for miss in _NEAREST if miss in misses), None))

        try:
            return await self._store.call(look)
        except ServiceError:
            return Found()

    def put(self, salt: Salt, tokens: Sequence[int], state: State, origin: State | None) -> bool:
        """Begin to write `state`, which results from feeding these tokens to `origin` (None: the empty state). Does not wait. Returns False
        if the store fails or too many states are being written already.
        """

        def write(engine: StateEngine) -> None:
            now = time.time()
            ((length, content),) = hashes(tokens, [len(tokens)])
            entry = _Entry(content, _salt(salt), self._model, self._numerics, length, 0, now, now)
            body = self._packing.seal(entry.id, self._packing.whole(state, origin, tokens), now)
            self._add(engine, _apart(salt.tenant), entry._replace(size=len(body)), body)

        return self._writer.begin(write)

    def _add(self, engine: StateEngine, tenant: str, entry: _Entry, body: bytes) -> None:
        """Write the state, then the index. Then delete the states that were removed from the index."""
        if entry.size > self._most_bytes:
            return
        engine.write(Document(kind=_STATE, id=entry.id, tenant=tenant, body=body, expires=entry.written + _LIFE_S), None, NO_QUOTA)
        for _ in range(_ATTEMPTS):
            before, version = _read(engine, tenant)
            with self._lock:
                used = {row.id: max(row.used, self._used.pop((tenant, row.id), 0.0)) for row in before}
            rows = [row._replace(used=used[row.id]) for row in before if row.id != entry.id]
            rows = [row for row in rows if row.written + _LIFE_S > entry.written]
            kept, size = [entry], entry.size
            for row in sorted(rows, key=lambda row: row.used, reverse=True):
                size += row.size
                if size > self._most_bytes or len(kept) == _MOST_STATES:
                    break
                kept.append(row)
            index = Document(kind=_INDEX, id=_INDEX, tenant=tenant, body=b"".join(_ROW.pack(*row) for row in kept))
            try:
                engine.write(index, version, NO_QUOTA)
            except DocumentMoved:
                continue
            for gone in {row.id for row in before} - {row.id for row in kept}:
                with suppress(StateNotFound):
                    engine.erase(tenant, _STATE, gone, None)
            return

    def _note(self, tenant: str, id: str) -> None:
        with self._lock:
            self._used[tenant, id] = time.time()
            if len(self._used) > _MOST_NOTED:
                self._used.clear()

    def _foreign(self, row: _Entry) -> Miss | None:
        """Return why this engine may not continue the state, or None if it may."""
        if row.model != self._model:
            return "model"
        return "numerics" if row.numerics != self._numerics else None


def _read(engine: StateEngine, tenant: str) -> tuple[list[_Entry], int]:
    """Return the entries of a tenant's index, and the index's version."""
    try:
        document = engine.read(tenant, _INDEX, _INDEX)
    except StateNotFound:
        return [], 0
    if len(document.body) % _ROW.size:
        return [], document.version
    return [_Entry(*row) for row in _ROW.iter_unpack(document.body)], document.version


def _apart(tenant: str) -> str:
    """Return the tenant under which shared prefixes are stored. No API key can have this tenant, so they do not count against the quota of
    the real tenant's states.
    """
    return f"{tenant}/prefixes"


def _salt(salt: Salt) -> bytes:
    return _hash(salt.own.encode(), salt.start.encode(), size=16)


def _hash(*parts: bytes, size: int) -> bytes:
    """Return a hash of the parts. Different lists of parts have different hashes, even if their concatenated bytes are equal."""
    return blake2b(b"".join(len(part).to_bytes(8, "little") + part for part in parts), digest_size=size).digest()
