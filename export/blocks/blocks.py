"""The blocks of one matrix: 32 weights of a row share a scale, and may share an offset.

w = scale * (q - zero) + offset,   0 <= q < 2^bits,   zero = 2^(bits - 1)

This is the form of onnxruntime's MatMulNBits, which has no offset. The formats of GGUF files have it too (`stored.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK = 32  # weights that share a scale; with 128, a row's bits depend on the other rows of its batch (docs/decisions.md)


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix (M, K) in blocks along K. The last block of a row is filled up, so a row has n = ceil(K / BLOCK) blocks."""

    bits: int  # 4 or 8
    K: int
    q: Bytes  # (M, n, BLOCK), one weight a byte, also with 4 bits
    scales: Array  # (M, n)
    offsets: Array | None = None  # (M, n)

    @property
    def zero(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def packed(self) -> Bytes:
        """The weights as MatMulNBits reads them: (M, n, BLOCK * bits / 8). With 4 bits, the first of two weights is the low half."""
        return self.q if self.bits == 8 else self.q[..., 0::2] | self.q[..., 1::2] << np.uint8(4)

    @property
    def widened(self) -> "Blocks":
        """The same weights in 8 bits."""
        return self if self.bits == 8 else Blocks(8, self.K, self.q + np.uint8(128 - self.zero), self.scales, self.offsets)

    def rows(self, order: NDArray[np.intp]) -> "Blocks":
        """The rows of the matrix in another order."""
        return Blocks(self.bits, self.K, self.q[order], self.scales[order], None if self.offsets is None else self.offsets[order])

    def weights(self) -> Array:
        """The matrix (M, K) in float32."""
        w = self.scales[..., None] * (self.q.astype(np.float32) - np.float32(self.zero))
        w = w if self.offsets is None else w + self.offsets[..., None]
        return w.reshape(len(w), -1)[:, : self.K]


def below_each_other(parts: Sequence[Blocks]) -> Blocks:
    """Join matrices (M_i, K) to one of (sum of M_i, K). If their bits differ, it has 8."""
    parts = parts if len({part.bits for part in parts}) == 1 else [part.widened for part in parts]
    q, scales = (np.concatenate([getattr(part, name) for part in parts]) for name in ("q", "scales"))
    offsets = [part.offsets for part in parts]
    if all(each is None for each in offsets):
        return Blocks(parts[0].bits, parts[0].K, q, scales)
    joined = [np.zeros_like(part.scales) if part.offsets is None else part.offsets for part in parts]
    return Blocks(parts[0].bits, parts[0].K, q, scales, np.concatenate(joined))


def rounded(weights: Array, bits: int) -> Blocks:
    """Round a matrix (M, K) to the nearest blocks without offsets. The weight of a block that is furthest from zero becomes q = 0, as in
    Q4_0.
    """
    w = in_blocks(weights)
    furthest = np.take_along_axis(w, np.abs(w).argmax(axis=2, keepdims=True), axis=2)
    zero = 1 << (bits - 1)
    scales = (furthest / np.float32(-zero)).astype(np.float32)
    up = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    q = np.clip(np.rint(w * up) + zero, 0, 2 * zero - 1).astype(np.uint8)
    return Blocks(bits, weights.shape[1], q, scales[..., 0])


def in_blocks(weights: Array) -> Array:
    """Return a matrix (M, K) as (M, n, BLOCK), with zeros after the end of each row."""
    M, K = weights.shape
    return np.pad(weights, ((0, 0), (0, -K % BLOCK))).reshape(M, -1, BLOCK)
