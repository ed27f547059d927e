"""Caches the states after prompts and completions in memory. A prompt that begins with the tokens of a cached state is fed from there on.

A state is found by the token ids that were fed to reach it, the id of the state to which they were fed, and a salt. States are cached at
two boundaries: the end of a prompt, and the last token of a completion that was fed. A recurrent state is exact, so a cache hit changes no
bit of the answer. Tenants have different salts, and a request can add its own (`cache_salt`), so the time of an answer does not reveal the
prompts of others.

The cache belongs to one engine. `shared_prefixes.py` writes the states after long prompts to the store, for the engines of other processes.
A state that is found in the store is put into this cache before its run begins.
"""

import threading
from collections import Counter
from collections.abc import Sequence as Several
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from service.generation.state import State
from service.runtime.lru import Lru
from service.telemetry.metrics import Miss

LEAST_TOKENS = 16  # shorter prefixes are not cached: feeding them takes about as long as a lookup
_TRIED = 256  # most boundaries that are looked up for a prompt, which takes 0.2 ms
_GONE = 4096  # number of hashes of evicted states that are remembered, to explain why a prompt was not found


class Salt(NamedTuple):
    """Determines which requests may find a state: requests of `tenant` with the same salt `own` that begin at the same state."""

    tenant: str
    own: str
    start: str  # id of the state that the prompt continues; "": the empty state


class Entry(NamedTuple):
    """The state after `length` tokens. The store has the state after the first `shared` of them (0: no state)."""

    length: int
    beginning: bytes  # hash of the first `LEAST_TOKENS` tokens
    state: State
    shared: int


_Key = tuple[Salt, int, bytes]  # the salt, the number of tokens and their hash


class PrefixCache:
    """The most recently used states, up to `most_bytes` in total. Used on any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: Lru[_Key, Entry] = Lru(most_bytes)
        self._gone: Lru[_Key, Miss] = Lru(_GONE)  # the reason why a state is not in the cache
        self._lengths: dict[Salt, Counter[int]] = {}  # number of states of each length
        self._beginnings: Counter[tuple[Salt, bytes]] = Counter()  # number of states of each beginning
        self._lock = threading.Lock()

    def find(self, salt: Salt, tokens: Several[int], most: int) -> tuple[Entry | None, Miss | None]:
        """Return the state after the longest cached prefix of at most `most` tokens, and None; or None and the reason why none was
        found.
        """
        if not self._most_bytes:
            return None, "disabled"
        if most < LEAST_TOKENS:
            return None, "short"
        with self._lock:
            lengths = sorted(length for length in self._lengths.get(salt, ()) if length <= most)
            for length, digest in reversed(hashes(tokens, lengths[-_TRIED:])):
                if (entry := self._entries.get((salt, length, digest))) is not None:
                    return entry, None
            return None, self._why(salt, tokens, most)

    def put(self, salt: Salt, tokens: Several[int], state: State, shared: int = 0) -> None:
        """Cache the state after these tokens. `state` must have logits. The store has the state after the first `shared` tokens (0: no
        state).
        """
        if len(tokens) < LEAST_TOKENS:
            return
        ((_, beginning), (length, digest)) = hashes(tokens, [LEAST_TOKENS, len(tokens)])
        with self._lock:
            key, before = (salt, length, digest), len(self._entries)
            evicted = self._entries.put(key, Entry(length, beginning, state, shared), state.size_bytes)
            if len(self._entries) + len(evicted) > before:
                self._lengths.setdefault(salt, Counter())[length] += 1
                self._beginnings[salt, beginning] += 1
            for gone, entry in evicted:
                self._forget(gone, entry)

    def explain(self, salt: Salt, tokens: Several[int], miss: Miss) -> None:
        """Note why there is no state after these tokens. The next `find` that does not find the state returns this reason."""
        if len(tokens) >= LEAST_TOKENS:
            ((length, digest),) = hashes(tokens, [len(tokens)])
            with self._lock:
                self._gone.put((salt, length, digest), miss)

    def has(self, salt: Salt, tokens: Several[int]) -> bool:
        """Return whether the state after exactly these tokens is cached, or can never be cached."""
        if len(tokens) < LEAST_TOKENS or not self._most_bytes:
            return True  # such a state is never cached, so the caller need not copy it
        ((length, digest),) = hashes(tokens, [len(tokens)])
        with self._lock:
            return (salt, length, digest) in self._entries

    def _forget(self, key: _Key, entry: Entry) -> None:
        salt = key[0]
        _take(self._beginnings, (salt, entry.beginning))
        _take(self._lengths[salt], entry.length)
        if not self._lengths[salt]:
            del self._lengths[salt]
        self._gone.put(key, "evicted")

    def _why(self, salt: Salt, tokens: Several[int], most: int) -> Miss:
        """Return why no state was found, as far as the cached states and the remembered hashes of this salt show it. States of other salts
        are not reported, because `/metrics` is open and the reason would reveal that another tenant has sent this prompt.
        """
        ((_, beginning), (length, digest)) = hashes(tokens, [LEAST_TOKENS, most])
        return self._gone.get((salt, length, digest)) or ("boundary" if self._beginnings[salt, beginning] else "new")


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
