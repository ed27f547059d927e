"""Packs texts for the graph for GPUs (`contract.packed_interface`). Its inputs have one of a few shapes, the buckets.

T tokens of up to B texts are packed without padding between them; the padding at the end fills the bucket.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.runtime.bound import Field

LEAST_TOKENS, MOST_TOKENS = 1024, 32 * 1024  # T of the smallest bucket and, unless one text is longer, of the largest
MOST_PLACES = 2**21  # largest B * N, unless T needs more: every run copies B * N numbers to the device
TOKENS_A_TEXT = 32  # a bucket has room for texts of this mean length; shorter texts fill the room for texts before that for tokens


class Bucket(NamedTuple):
    """The sizes of the inputs of one run."""

    tokens: int  # T
    texts: int  # B
    longest: int  # N

    def field(self, tensor: contract.Tensor) -> Field:
        """Return the element type and shape of an input or output of `contract.packed_interface`."""
        sizes = {"T": self.tokens, "B": self.texts, "E": self.texts + 1, "N": self.longest}
        return Field(tensor.dtype, tuple(sizes[axis] if isinstance(axis, str) else axis for axis in tensor.shape))


def buckets(max_tokens: int, *, most_tokens: int = MOST_TOKENS) -> tuple[Bucket, ...]:
    """Return the buckets of a model for texts of up to `max_tokens` tokens, the smallest first. Each has twice the tokens of the one
    before.
    """
    sizes = [LEAST_TOKENS]
    while sizes[-1] < max(most_tokens, max_tokens):
        sizes.append(2 * sizes[-1])
    most_texts = MOST_PLACES // max_tokens
    return tuple(Bucket(T, max(min(T // TOKENS_A_TEXT, most_texts), -(-T // max_tokens)), max_tokens) for T in sizes)


def cuts(lengths: Sequence[int], largest: Bucket) -> Iterator[slice]:
    """Yield consecutive slices of texts of these lengths, each of which fits into the largest bucket."""
    begin = tokens = 0
    for at, length in enumerate(lengths):
        if tokens + length > largest.tokens or at - begin == largest.texts:
            yield slice(begin, at)
            begin, tokens = at, 0
        tokens += length
    yield slice(begin, len(lengths))


def smallest(buckets: Sequence[Bucket], *, tokens: int, texts: int) -> int:
    """Return the index of the smallest bucket with room for so many tokens and texts."""
    return next(at for at, bucket in enumerate(buckets) if bucket.tokens >= tokens and bucket.texts >= texts)


def pack(
    arrays: Mapping[str, NDArray[Any]],
    pooling: contract.PoolingByWeights,
    ids: Sequence[Sequence[int]],
    type_ids: Sequence[Sequence[int]] | None,
) -> None:
    """Fill the inputs of a bucket, given by name, with texts: at most B, with at most T tokens in total and N in each."""
    B, N = arrays[contract.TOKEN_OFFSET].shape
    lengths = np.fromiter(map(len, ids), np.int32, len(ids))
    ends = np.cumsum(lengths)
    n_tokens = int(ends[-1])
    text = np.repeat(np.arange(len(ids), dtype=np.int32), lengths)
    position = np.arange(n_tokens, dtype=np.int32) - np.repeat(ends - lengths, lengths)
    contributes, weight = pooled_tokens(pooling, position, lengths[text])
    filled: dict[str, NDArray[Any]] = {
        contract.INPUT_IDS: np.fromiter(chain.from_iterable(ids), np.int32, n_tokens),
        contract.POSITION_IDS: position,
        contract.TEXT_OF_TOKEN: np.where(contributes, text, -1),
        contract.POOLING_WEIGHT: weight,
    }
    if contract.TOKEN_TYPE_IDS in arrays:
        types = chain.from_iterable(type_ids) if type_ids is not None else repeat(0, n_tokens)
        filled[contract.TOKEN_TYPE_IDS] = np.fromiter(types, np.int32, n_tokens)
    for name, numbers in filled.items():
        array = arrays[name]
        array[:n_tokens] = numbers
        array[n_tokens:] = -1 if name == contract.TEXT_OF_TOKEN else 0
    arrays[contract.TEXTS][:, 0] = np.arange(B)
    cu_seqlens = arrays[contract.CU_SEQLENS]
    cu_seqlens[0], cu_seqlens[1 : len(ids) + 1] = 0, ends
    cu_seqlens[len(ids) + 1 :] = n_tokens
    padded = np.zeros(B, np.int32)
    padded[: len(ids)] = lengths
    taken = (np.arange(N, dtype=np.int32) < padded[:, None]).ravel()
    places = arrays[contract.TOKEN_OFFSET].reshape(-1)
    places[:n_tokens], places[n_tokens:] = np.flatnonzero(taken), np.flatnonzero(~taken)


def pooled_tokens(
    pooling: contract.PoolingByWeights, position: NDArray[np.int32], length: NDArray[np.int32]
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Return for each token whether it contributes to its text's vector, and its weight: (T,), (T,) -> (T,), (T,). `position` is its place
    in its text, `length` the length of the text.
    """
    if pooling in ("cls", "last"):
        return position == (0 if pooling == "cls" else length - 1), np.ones(len(position), np.float32)
    weight = 1 / (length if pooling == "mean" else np.sqrt(length))
    return np.ones(len(position), np.bool_), weight.astype(np.float32)
