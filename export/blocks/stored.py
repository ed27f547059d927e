"""The blocks of a GGUF file as blocks of a graph.

| type | in the file | here |
|---|---|---|
| Q8_0 | d q, q from -128 to 127 | 8 bits, the same numbers |
| Q4_0 | d (q - 8) | 4 bits, the same numbers |
| Q4_1 | d q + m | 4 bits with offsets: d (q - 8) + (m + 8 d) |
| Q4_K | d q - m, 8 blocks of 32 with products of two scales | 4 bits with offsets |
| Q5_K | d q - m, as above, q in 5 bits | 8 bits with offsets |
| Q6_K | d (q - 32), blocks of 16 | 8 bits in blocks of 32, rounded again: an error of up to 1/128 of a block's largest weight |

Scales and offsets are in float32 here, so all but the last have the weights of the file up to the rounding of m + 8 d. Layouts of the
bytes: ggml-org/llama.cpp, gguf-py/gguf/quants.py.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf.quants import Q4_K

from export.blocks.blocks import BLOCK, Array, Blocks, Bytes, below_each_other, rounded
from export.blocks.graph import digest
from models.checkpoints.gguf.file import GgufFile, StoredTensor
from models.checkpoints.gguf.tensors import published_tensors


class StoredBlocks:
    """The blocks of all matrices of a GGUF file that have blocks, found by the values of the weights.

    The rows are in the order of Hugging Face folders, in which the model is loaded.
    """

    def __init__(self, path: Path) -> None:
        self._found: dict[str, list[tuple[str, Blocks]]] = {}  # digest of the first row -> digest and blocks of matrices that begin with it
        for tensor in published_tensors(GgufFile(path)):
            if len(tensor.stored.shape) == 2 and tensor.stored.type in (*_READERS, "Q6_K"):
                blocks, weights = blocks_of(tensor.stored), tensor.weights()
                blocks = blocks if tensor.rows is None else blocks.rows(tensor.rows)
                self._found.setdefault(digest(weights[:1]), []).append((digest(weights), blocks))

    def __call__(self, weights: Array) -> Blocks | None:
        """Return the blocks of a matrix (M, K), which may be several matrices of the file below each other; None if the file has none."""
        parts: list[Blocks] = []
        while (done := sum(len(part.q) for part in parts)) < len(weights):
            rest = weights[done:]
            beginning = self._found.get(digest(rest[:1]), [])
            part = next((blocks for name, blocks in beginning if digest(rest[: len(blocks.q)]) == name), None)
            if part is None:
                return None
            parts.append(part)
        return below_each_other(parts)


def blocks_of(tensor: StoredTensor) -> Blocks:
    """Return a matrix of the file in blocks."""
    M, K = tensor.shape
    if tensor.type not in _READERS:
        return rounded(tensor.weights(), 8)
    bits, q, scales, offsets = _READERS[tensor.type](tensor.data.reshape(M, K // _WEIGHTS[tensor.type], -1))
    n = K // BLOCK
    return Blocks(bits, K, q.reshape(M, n, BLOCK), scales.reshape(M, n), None if offsets is None else offsets.reshape(M, n))


# All readers take bytes (M, blocks of the file, bytes of a block) and return bits, q (.., BLOCK), scales (..) and offsets (..).
_Read = tuple[int, Bytes, Array, Array | None]


def _q8_0(data: Bytes) -> _Read:
    return 8, data[..., 2:] + np.uint8(128), _number(data, 0), None  # from int8 to uint8 with zero point 128, by wrapping around


def _q4_0(data: Bytes) -> _Read:
    return 4, _halves(data[..., 2:]), _number(data, 0), None


def _q4_1(data: Bytes) -> _Read:
    d, m = _number(data, 0), _number(data, 1)
    return 4, _halves(data[..., 4:]), d, m + 8 * d


def _q4_k(data: Bytes) -> _Read:
    d, m = _scales(data)
    return 4, _halves(data[..., 16:].reshape(*data.shape[:2], 4, BLOCK)).reshape(*d.shape, BLOCK), d, 8 * d - m


def _q5_k(data: Bytes) -> _Read:
    d, m = _scales(data)
    low = _halves(data[..., 48:].reshape(*data.shape[:2], 4, BLOCK)).reshape(*d.shape, BLOCK)
    high = data[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # (M, blocks, 8, BLOCK)
    return 8, (low | high << np.uint8(4)) + np.uint8(112), d, 16 * d - m  # q from 112 to 143, so that 16 becomes the zero point 128


def _halves(data: Bytes) -> Bytes:
    """The low halves of all bytes of an axis, then the high halves."""
    return np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=-1)


def _number(data: Bytes, place: int) -> Array:
    """The number at this place of each block, in float16 in the file."""
    return np.ascontiguousarray(data[..., 2 * place : 2 * place + 2]).view(np.float16)[..., 0].astype(np.float32)


def _scales(data: Bytes) -> tuple[Array, Array]:
    """The scales and the amounts that are subtracted, (M, blocks of the file, 8), each the product of a block's number and 6 bits."""
    shape = (*data.shape[:2], 8)
    scales, least = Q4_K.get_scale_min(np.ascontiguousarray(data[..., 4:16]).reshape(-1, 12))
    return (
        _number(data, 0)[..., None] * scales.astype(np.float32).reshape(shape),
        _number(data, 1)[..., None] * least.astype(np.float32).reshape(shape),
    )


_READERS: dict[str, Callable[[Bytes], _Read]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_K": _q5_k}
_WEIGHTS = {"Q8_0": 32, "Q4_0": 32, "Q4_1": 32, "Q4_K": 256, "Q5_K": 256}  # weights of a block of the file
