"""Caches the states after prompts and completions in memory. A prompt that begins with the tokens of a cached state is fed from there on.

A state is found by the token ids that were fed to reach it, the id of the state to which they were fed, and a salt. States are cached at
two boundaries: the end of a prompt, and the last token of a completion that was fed. A recurrent state is exact, so a cache hit changes no
bit of the answer. Tenants have different salts, and a request can add its own (`cache_salt`), so the time of an answer does not reveal the
prompts of others.

The cache belongs to one engine. `shared_prefixes.py` writes the states after long prompts to the store, for the engines of other processes.
A state that is found in the store is put into this cache before its run begins.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from service.generation.state import State
from service.telemetry.metrics import Miss

LEAST_TOKENS = 16  # shorter prefixes are not cached: feeding them takes about as long as a lookup
_TRIED = 256  # most boundaries that are looked up for a prompt, which takes 0.2 ms
_GONE = 4096  # number of hashes of evicted states that are remembered, to explain why a prompt was not found


class Salt(NamedTuple):
    """Determines which requests may find a state: requests of `tenant` with the same salt `own` that begin at the same state."""

    tenant: str
    own: str
    start: str  # id of the state that the prompt continues; "": the empty state


@dataclass
class _Boundaries:
    """Counts the states of one salt, by their length in tokens, and by the hash of their first `LEAST_TOKENS` tokens."""

    lengths: Counter[int] = field(default_factory=Counter)
    beginnings: Counter[bytes] = field(default_factory=Counter)


class _Entry(NamedTuple):
    salt: Salt
    length: int
    beginning: bytes
    state: State
    shared: int  # the store has the state after this number of first tokens; 0: no state


class PrefixCache:
    """The most recently used states, up to `most_bytes` in total. Used on any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: OrderedDict[tuple[Salt, int, bytes], _Entry] = OrderedDict()  # least recently used first
        self._boundaries: dict[Salt, _Boundaries] = {}
        self._gone: OrderedDict[tuple[Salt, int, bytes], Miss] = OrderedDict()  # the reason why a state is not in the cache
        self._size = 0  # bytes
        self._lock = threading.Lock()

    def find(self, salt: Salt, tokens: Several[int], most: int) -> tuple[State | None, Miss | None]:
        """Return the state after the longest cached prefix of at most `most` tokens, and None; or None and the reason why none was
        found.
        """
        entry, miss = self.entry(salt, tokens, most)
        return (None if entry is None else entry.state), miss

    def entry(self, salt: Salt, tokens: Several[int], most: int) -> tuple[_Entry | None, Miss | None]:
        """Return what `find` returns, but the entry of the state instead of the state."""
        if not self._most_bytes:
            return None, "disabled"
        if most < LEAST_TOKENS:
            return None, "short"
        with self._lock:
            boundaries = self._boundaries.get(salt, _Boundaries())
            found = hashes(tokens, [length for length in sorted(boundaries.lengths) if length <= most][-_TRIED:])
            for length, digest in reversed(found):
                if (entry := self._entries.get(key := (salt, length, digest))) is not None:
                    self._entries.move_to_end(key)
                    return entry, None
            return None, self._why(salt, tokens, most, boundaries)

    def put(self, salt: Salt, tokens: Several[int], state: State, shared: int = 0) -> None:
        """Cache the state after these tokens. `state` must have logits. The store has the state after the first `shared` tokens (0: no
        state).
        """
        if len(tokens) < LEAST_TOKENS or (size := state.size_bytes) > self._most_bytes:
            return
        ((_, beginning), (length, digest)) = hashes(tokens, [LEAST_TOKENS, len(tokens)])
        with self._lock:
            self._put((salt, length, digest), _Entry(salt, length, beginning, state, shared), size)

    def explain(self, salt: Salt, tokens: Several[int], miss: Miss) -> None:
        """Note why there is no state after these tokens. The next `find` that does not find the state returns this reason."""
        if len(tokens) >= LEAST_TOKENS:
            ((length, digest),) = hashes(tokens, [len(tokens)])
            with self._lock:
                self._note((salt, length, digest), miss)

    def _put(self, key: tuple[Salt, int, bytes], entry: _Entry, size: int) -> None:
        salt, length, beginning, _, _ = entry
        self._gone.pop(key, None)
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        self._entries[key] = entry
        boundaries = self._boundaries.setdefault(salt, _Boundaries())
        boundaries.lengths[length] += 1
        boundaries.beginnings[beginning] += 1
        self._size += size
        while self._size > self._most_bytes:
            self._evict()

    def has(self, salt: Salt, tokens: Several[int]) -> bool:
        """Return whether the state after exactly these tokens is cached, or can never be cached."""
        if len(tokens) < LEAST_TOKENS or not self._most_bytes:
            return True  # such a state is never cached, so the caller need not copy it
        ((length, digest),) = hashes(tokens, [len(tokens)])
        with self._lock:
            return (salt, length, digest) in self._entries

    def _evict(self) -> None:
        key, entry = self._entries.popitem(last=False)
        self._size -= entry.state.size_bytes
        boundaries = self._boundaries[entry.salt]
        for counter, value in ((boundaries.lengths, entry.length), (boundaries.beginnings, entry.beginning)):
            _take(counter, value)
        if not boundaries.lengths:
            del self._boundaries[entry.salt]
        self._note(key, "evicted")

    def _note(self, key: tuple[Salt, int, bytes], miss: Miss) -> None:
        self._gone[key] = miss
        if len(self._gone) > _GONE:
            self._gone.popitem(last=False)

    def _why(self, salt: Salt, tokens: Several[int], most: int, boundaries: _Boundaries) -> Miss:
        """Return why no state was found, as far as the cached states and the remembered hashes of this salt show it. States of other salts
        are not reported, because `/metrics` is open and the reason would reveal that another tenant has sent this prompt.
        """
        ((_, beginning), (length, digest)) = hashes(tokens, [LEAST_TOKENS, most])
        if (miss := self._gone.get((salt, length, digest))) is not None:
            return miss
        return "boundary" if boundaries.beginnings[beginning] else "new"


def _take(counter: Counter, value: object) -> None:  # type: ignore[type-arg]
    counter[value] -= 1
    if not counter[value]:
        del counter[value]


def hashes(tokens: Several[int], lengths: Several[int]) -> list[tuple[int, bytes]]:
    """Return, for each length, the length and the hash of that many first tokens. `lengths` are in ascending order."""
    content = memoryview(np.array(tokens[: lengths[-1]] if lengths else (), "<i4").tobytes())
    running, done, found = blake2b(digest_size=16), 0, []
    for length in lengths:
        running.update(content[4 * done : 4 * length])
        done = length
        found.append((length, running.copy().digest()))
    return found
