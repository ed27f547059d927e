"""Texts are packed into a few shapes; what is packed says where each text is."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export import contract
from service.encoding.gpu.packing import MOST_PLACES, MOST_TOKENS, TOKENS_A_TEXT, Bucket, buckets, cuts, pack, smallest

POOLINGS = contract.POOLING_WEIGHTS
SMALL = Bucket(tokens=48, texts=7, longest=16)
lengths_of_texts = st.lists(st.integers(1, SMALL.longest), min_size=1, max_size=60)


def arrays_of(bucket: Bucket) -> dict[str, np.ndarray]:
    inputs = contract.packed_interface("reranker", 1, typed=True).inputs
    fields = {tensor.name: bucket.field(tensor) for tensor in inputs}
    return {name: np.full(field.shape, 99, field.dtype) for name, field in fields.items()}  # 99: what an earlier run has left


def packed(lengths: Sequence[int], pooling: contract.PoolingByWeights = "mean") -> dict[str, np.ndarray]:
    arrays = arrays_of(SMALL)
    ids = [[10 * text + at for at in range(length)] for text, length in enumerate(lengths)]
    pack(arrays, pooling, ids, None)
    return arrays


@pytest.mark.parametrize("max_tokens", [16, 256, 512, 8192, 100_000])
def test_the_number_of_shapes_is_bounded(max_tokens: int) -> None:
    found = buckets(max_tokens)
    assert len(found) == 6 or max_tokens > MOST_TOKENS
    assert found[-1].tokens >= max(MOST_TOKENS, max_tokens)
    for bucket in found:
        assert bucket.tokens <= bucket.texts * bucket.longest <= max(MOST_PLACES, 2 * bucket.tokens, bucket.longest)
        assert bucket.texts <= max(bucket.tokens // TOKENS_A_TEXT, -(-bucket.tokens // max_tokens))
    assert all(2 * small.tokens == large.tokens for small, large in pairwise(found))


@given(lengths=lengths_of_texts)
def test_every_cut_fits_and_no_text_is_left_out(lengths: list[int]) -> None:
    found = list(cuts(lengths, SMALL))
    assert [length for piece in found for length in lengths[piece]] == lengths
    for piece in found:
        assert 0 < len(lengths[piece]) <= SMALL.texts
        assert sum(lengths[piece]) <= SMALL.tokens
        assert smallest([SMALL], tokens=sum(lengths[piece]), texts=len(lengths[piece])) == 0


@given(lengths=lengths_of_texts)
def test_places_are_those_of_padded_rows(lengths: list[int]) -> None:
    lengths = lengths[next(cuts(lengths, SMALL))]
    arrays, n = packed(lengths), sum(lengths)
    T, B, N = SMALL
    places = arrays[contract.TOKEN_OFFSET].ravel()
    assert sorted(places) == list(range(B * N))  # each padded place once
    ends = arrays[contract.CU_SEQLENS]
    assert ends[0] == 0
    assert np.diff(ends).tolist() == [*lengths, *[0] * (B - len(lengths))]
    for text, length in enumerate(lengths):
        here = slice(ends[text], ends[text + 1])
        assert places[here].tolist() == [text * N + at for at in range(length)]
        assert arrays[contract.INPUT_IDS][here].tolist() == [10 * text + at for at in range(length)]
        assert arrays[contract.POSITION_IDS][here].tolist() == list(range(length))
    assert (arrays[contract.TEXT_OF_TOKEN][n:] == -1).all()
    assert not arrays[contract.INPUT_IDS][n:].any()
    assert not arrays[contract.TOKEN_TYPE_IDS].any()
    assert arrays[contract.TEXTS].ravel().tolist() == list(range(B))
    assert len(arrays[contract.INPUT_IDS]) == T


@pytest.mark.parametrize("pooling", POOLINGS)
def test_weights_are_those_of_the_pooling(pooling: contract.PoolingByWeights) -> None:
    arrays, matrix = packed([3, 1, 4], pooling), np.zeros((3, 8))
    for at, text in enumerate(arrays[contract.TEXT_OF_TOKEN][:8]):
        if text >= 0:
            matrix[text, at] = arrays[contract.POOLING_WEIGHT][at]
    sums = np.array([[1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]])
    wanted = {
        "mean": sums / [[3], [1], [4]],
        "mean_sqrt_len": sums / np.sqrt([[3], [1], [4]]),
        "cls": np.eye(8)[[0, 3, 4]],
        "last": np.eye(8)[[2, 3, 7]],
    }
    assert np.allclose(matrix, wanted[pooling])
