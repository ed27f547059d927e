"""Applies the prefix cache, and the shared prefixes in the store, to the runs of an engine: runs begin at the states in them and add new
states.
"""

from collections.abc import Callable
from collections.abc import Sequence as Several

from service.generation.request import GenerationRequest
from service.generation.saved.prefix_cache import PrefixCache, Salt
from service.generation.saved.shared_prefixes import SharedPrefixes
from service.generation.sequence import Sequence
from service.generation.session import Logits, Tensor
from service.generation.state import State
from service.telemetry.metrics import GeneratorMetrics

_MOST_TOKENS = 32_768  # longer prefixes are not cached: hashing them would delay the next step


class Prefixes:
    """The prefix cache of an engine, and the store's shared prefixes. `fetch` is called on the event loop, all other methods on the
    engine's thread.
    """

    def __init__(self, cache: PrefixCache, shared: SharedPrefixes | None, fingerprint: str, metrics: GeneratorMetrics) -> None:
        """`shared` finds the states that other engines have written to the store. `fingerprint` identifies the bundle."""
        self._cache = cache
        self._shared = shared
        self._fingerprint = fingerprint
        self._metrics = metrics

    async def fetch(self, request: GenerationRequest) -> None:
        """If the store has a state that saves this request more tokens than the states in the cache, put this state into the cache."""
        tokens = request.prompt + request.known
        if self._shared is None or not self._shared.least <= len(tokens) <= _MOST_TOKENS or request.prompt_logprobs is not None:
            return
        salt, most = _salt_of(request), len(tokens) - (not request.max_tokens)
        entry, _ = self._cache.find(salt, tokens, most)
        found = await self._shared.find(salt, tokens, most, 0 if entry is None else entry.length)
        if found.state is not None:
            self._cache.put(salt, tokens[: found.length], found.state, found.length)
        elif found.miss is not None:
            self._cache.explain(salt, tokens[:most], found.miss)

    def begin(self, sequence: Sequence) -> None:
        """Let a run that has no slot yet begin after the longest prefix of its prompt whose state is cached."""
        request, salt = sequence.request, _salt(sequence)
        if salt is None or not sequence.tokens or request.prompt_logprobs is not None:  # log-probabilities need every token's logits
            return
        entry, miss = self._cache.find(salt, sequence.tokens, len(sequence.tokens) - (sequence.over is not None))
        found = 0 if entry is None else entry.length
        self._metrics.looked_up(len(sequence.tokens), found, miss)
        if entry is not None:
            sequence.base = sequence.state = entry.state
            sequence.position, sequence.fed = entry.state.position, found
            sequence.shared = entry.shared
            sequence.run.usage.cached_tokens += found

    def keep(self, sequence: Sequence, fed: tuple[int, ...], copy: Callable[[], tuple[Several[Tensor], Logits]]) -> None:
        """Cache the state of a run after the tokens `fed`, and share long prefixes in the store. `copy` returns the state's tensors, each
        without the batch axis, and its logits (V,).
        """
        salt = _salt(sequence)
        if salt is None or len(fed) > _MOST_TOKENS or self._cache.has(salt, fed):
            return
        tensors, logits = copy()
        position = sequence.start + len(fed)
        state = State(tensors=tuple(tensors), position=position, logits=logits, fingerprint=self._fingerprint)
        if (
            self._shared is not None
            and len(fed) - sequence.shared >= self._shared.least
            and self._shared.put(salt, fed, state, sequence.origin)
        ):
            sequence.shared = len(fed)
        self._cache.put(salt, fed, state, sequence.shared)


def _salt_of(request: GenerationRequest) -> Salt:
    return Salt(request.tenant, request.cache_salt, "" if request.start is None else request.start.id)


def _salt(sequence: Sequence) -> Salt | None:
    """Return the salt of this run's states, or None if the run began at a state that has no id."""
    return None if sequence.request.start is None and sequence.start else _salt_of(sequence.request)
