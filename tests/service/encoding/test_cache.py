"""The cache of vectors: what it keeps, and how much."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.encoding.cache import VectorCache, keys_of

_ENTRY_BYTES = 300  # what service.encoding.cache reckons an entry costs beside its numbers


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(cache: VectorCache, number: int, size: int = 100) -> None:
    row = np.zeros(size, np.float32)
    cache.add(key(number), row)


def test_the_least_recently_used_leaves_first() -> None:
    cache = VectorCache(3 * (400 + _ENTRY_BYTES))
    for number in (1, 2, 3):
        put(cache, number)
    cache.get(key(1))
    put(cache, 4)
    assert [cache.get(key(number)) is not None for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_a_row_larger_than_the_cache_is_not_kept_and_pushes_nothing_out() -> None:
    cache = VectorCache(1000)
    put(cache, 1)
    put(cache, 2, 10_000)
    assert (cache.get(key(1)) is not None, cache.get(key(2))) == (True, None)
    assert cache.all((key(1), key(2))) is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300), st.booleans())))
def test_its_bytes_never_exceed_the_bound_and_are_counted_exactly(steps: list[tuple[int, int, bool]]) -> None:
    cache = VectorCache(5000)
    for number, size, get in steps:
        if get:
            cache.get(key(number))
        else:
            put(cache, number, size)
        kept = [found for each in range(10) if (found := cache.get(key(each))) is not None]
        assert cache.size == sum(each.nbytes + _ENTRY_BYTES for each in kept) <= 5000


def test_a_key_tells_tenants_models_outputs_ids_and_types_apart() -> None:
    keys = [
        keys_of("", "f", ("sentence_embedding",), [1, 2], None),
        keys_of("", "g", ("sentence_embedding",), [1, 2], None),
        keys_of("", "f", ("pooled",), [1, 2], None),
        keys_of("", "f", ("sentence_embedding",), [2, 1], None),
        keys_of("", "f", ("sentence_embedding",), [1, 2, 0], None),
        keys_of("", "f", ("sentence_embedding",), [1, 2], [0, 0]),
        keys_of("", "f", ("sentence_embedding",), [1, 2], [0, 1]),
        keys_of("", "f", ("sentence_embedding",), [1, 2], None, 1),
        keys_of("acme", "f", ("sentence_embedding",), [1, 2], None),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == keys_of("", "f", ("sentence_embedding",), [1, 2], None)
