"""Keeps the states after prompts and completions in memory, so that a prompt that begins like an earlier one is not fed from its start.

A state is found by the token ids that led to it, the state that these continue, and a salt. Every boundary counts: the end of a prompt and
the last token that a completion fed. A recurrent state is exact, so a hit changes no bit of the answer. Tenants have different salts, and a
request can add its own (`cache_salt`), so the time of an answer does not reveal the prompts of others.

The cache belongs to one engine. A copy in the store of states would have to be written for each prompt, which takes longer than feeding a
few hundred tokens: for prompts longer than that, clients make a named state once and fork it (docs/states.md).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from service.generation.sequence import Sequence
from service.generation.session import Logits, Tensor
from service.generation.snapshot import State
from service.telemetry.metrics import GeneratorMetrics, Miss

LEAST_TOKENS = 16  # feeding fewer takes about as long as looking them up
_MOST_TOKENS = 32_768  # hashing more would delay the next step
_TRIED = 256  # most boundaries that are looked up for a prompt, which takes 0.2 ms
_GONE = 4096  # hashes of evicted states, to tell why a prompt was not found


class Salt(NamedTuple):
    """Who may find a state: the requests of a tenant with the same `own` salt that begin at the same state."""

    tenant: str
    own: str
    start: str  # id of the state that the prompt continues; "": the empty state


@dataclass
class _Boundaries:
    """The states of one salt: how many there are of each length, and the hashes of their first `LEAST_TOKENS` tokens."""

    lengths: Counter[int] = field(default_factory=Counter)
    beginnings: Counter[bytes] = field(default_factory=Counter)


class _Entry(NamedTuple):
    salt: Salt
    length: int
    beginning: bytes
    content: bytes  # hash of the tokens without the salt
    state: State


class PrefixCache:
    """The states used last, `most_bytes` at most. Used on one thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: OrderedDict[tuple[Salt, int, bytes], _Entry] = OrderedDict()  # least recently used first
        self._boundaries: dict[Salt, _Boundaries] = {}
        self._by_content: Counter[tuple[str, bytes]] = Counter()  # states by tenant and hash of their tokens
        self._contents: Counter[bytes] = Counter()  # the same of all tenants
        self._gone: OrderedDict[tuple[Salt, int, bytes], None] = OrderedDict()
        self._size = 0  # bytes

    def find(self, salt: Salt, tokens: Several[int], most: int) -> tuple[State | None, Miss | None]:
        """Return the state after the longest known prefix of at most `most` tokens, or None and the reason."""
        if not self._most_bytes:
            return None, "disabled"
        if most < LEAST_TOKENS:
            return None, "short"
        boundaries = self._boundaries.get(salt, _Boundaries())
        hashes = _hashes(tokens, [length for length in sorted(boundaries.lengths) if length <= most][-_TRIED:])
        for length, digest in reversed(hashes):
            if (entry := self._entries.get(key := (salt, length, digest))) is not None:
                self._entries.move_to_end(key)
                return entry.state, None
        return None, self._why(salt, tokens, most, boundaries)

    def put(self, salt: Salt, tokens: Several[int], state: State) -> None:
        """Keep the state after these tokens. `state` has logits."""
        if len(tokens) < LEAST_TOKENS or (size := _size(state)) > self._most_bytes:
            return
        ((_, beginning), (length, digest)) = _hashes(tokens, [LEAST_TOKENS, len(tokens)])
        key = (salt, length, digest)
        self._gone.pop(key, None)
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        self._entries[key] = _Entry(salt, length, beginning, digest, state)
        boundaries = self._boundaries.setdefault(salt, _Boundaries())
        boundaries.lengths[length] += 1
        boundaries.beginnings[beginning] += 1
        self._by_content[salt.tenant, digest] += 1
        self._contents[digest] += 1
        self._size += size
        while self._size > self._most_bytes:
            self._evict()

    def has(self, salt: Salt, tokens: Several[int]) -> bool:
        """Whether the state after exactly these tokens is kept."""
        if len(tokens) < LEAST_TOKENS or not self._most_bytes:
            return True  # nothing is to be done
        ((length, digest),) = _hashes(tokens, [len(tokens)])
        return (salt, length, digest) in self._entries

    def _evict(self) -> None:
        key, entry = self._entries.popitem(last=False)
        self._size -= _size(entry.state)
        boundaries = self._boundaries[entry.salt]
        for counter, value in ((boundaries.lengths, entry.length), (boundaries.beginnings, entry.beginning)):
            _take(counter, value)
        if not boundaries.lengths:
            del self._boundaries[entry.salt]
        _take(self._by_content, (entry.salt.tenant, entry.content))
        _take(self._contents, entry.content)
        self._gone[key] = None
        if len(self._gone) > _GONE:
            self._gone.popitem(last=False)

    def _why(self, salt: Salt, tokens: Several[int], most: int, boundaries: _Boundaries) -> Miss:
        """Return why no state was found, as far as can be told from what is kept."""
        ((_, beginning), (length, digest)) = _hashes(tokens, [LEAST_TOKENS, most])
        if (salt, length, digest) in self._gone:
            return "evicted"
        if boundaries.beginnings[beginning]:
            return "boundary"
        if self._by_content[salt.tenant, digest]:
            return "salt"
        return "tenant" if self._contents[digest] else "new"


class Prefixes:
    """The prefix cache of an engine: where its runs begin, and the states that they leave. Used on the engine's thread."""

    def __init__(self, cache: PrefixCache, fingerprint: str, metrics: GeneratorMetrics) -> None:
        """`fingerprint` is the bundle's."""
        self._cache = cache
        self._fingerprint = fingerprint
        self._metrics = metrics

    def begin(self, sequence: Sequence) -> None:
        """Begin a run that has no slot yet after the longest prefix of its prompt whose state is kept."""
        request, salt = sequence.request, _salt(sequence)
        if salt is None or not sequence.tokens or request.prompt_logprobs is not None:  # these need the logits of every token
            return
        state, miss = self._cache.find(salt, sequence.tokens, len(sequence.tokens) - (not request.max_tokens))
        found = 0 if state is None else state.position - sequence.position
        self._metrics.looked_up(len(sequence.tokens), found, miss)
        if state is not None:
            sequence.base = sequence.state = state
            sequence.position, sequence.fed = state.position, found
            sequence.run.usage.cached_tokens += found

    def keep(self, sequence: Sequence, fed: tuple[int, ...], copy: Callable[[], tuple[Several[Tensor], Logits]]) -> None:
        """Keep the state after the tokens `fed` of a run. `copy` returns its tensors, each without B, and its logits (V,)."""
        salt = _salt(sequence)
        if salt is not None and len(fed) <= _MOST_TOKENS and not self._cache.has(salt, fed):
            tensors, logits = copy()
            position = sequence.start + len(fed)
            self._cache.put(salt, fed, State(tensors=tuple(tensors), position=position, logits=logits, fingerprint=self._fingerprint))


def _salt(sequence: Sequence) -> Salt | None:
    """Return who may find the states of this run, or None if the state that it began with has no name."""
    request = sequence.request
    if request.start is None:
        return None if sequence.start else Salt(request.tenant, request.cache_salt, "")
    return Salt(request.tenant, request.cache_salt, request.start.id)


def _take(counter: Counter, value: object) -> None:  # type: ignore[type-arg]
    counter[value] -= 1
    if not counter[value]:
        del counter[value]


def _size(state: State) -> int:
    assert state.logits is not None
    return sum(tensor.nbytes for tensor in state.tensors) + state.logits.nbytes


def _hashes(tokens: Several[int], lengths: Several[int]) -> list[tuple[int, bytes]]:
    """Return each length with the hash of so many first tokens. `lengths` are in ascending order."""
    content = memoryview(np.array(tokens[: lengths[-1]] if lengths else (), "<i4").tobytes())
    running, done, found = blake2b(digest_size=16), 0, []
    for length in lengths:
        running.update(content[4 * done : 4 * length])
        done = length
        found.append((length, running.copy().digest()))
    return found
