"""Parts of all multi-head layers: projections of tokens to H heads, and of the concatenated heads back to tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.attention.layers.mechanism import Mechanism
from models.parts.positions import Rotation, rotate


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """Split the last axis into heads: (B, N, H * D_k) -> (B, H, N, D_k)."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Concatenate the heads: (B, H, N, D_k) -> (B, N, H * D_k)."""
    return x.transpose(1, 2).flatten(-2)


def head_width(d_model: int, n_heads: int, d_head: int | None) -> int:
    """Return D_k: d_head or, if that is None, D / H. Raises ValueError if d_head is None and D is not divisible by H."""
    if d_head is None and d_model % n_heads:
        raise ValueError(f"d_model={d_model} is not divisible by n_heads={n_heads}; give d_head, or change one of them")
    return d_head or d_model // n_heads


def both_masks(key_mask: Tensor | None, pair_mask: Tensor | None) -> Tensor | None:
    """Combine key_mask (B, N_k) and pair_mask (N_q, N_k) by "and" to a mask that broadcasts to (B, H, N_q, N_k). None allows all pairs."""
    if key_mask is None:
        return pair_mask
    keys_B11N = key_mask[:, None, None, :]
    return keys_B11N if pair_mask is None else keys_B11N & pair_mask


def heads_of(
    x: Tensor, projections: Sequence[nn.Module], n_heads: int, rotation: Rotation | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the three projections, of q, k and v, to x. The other arguments and the result are those of `EqualHeads.heads`."""
    q, k, v = (split_heads(to(x), n_heads) for to in projections)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)


class EqualHeads(Mechanism):
    """A layer with H heads of equal width in q, k and v: `to_q`, `to_k` and `to_v` are D -> H * D_k, `to_out` is H * D_k -> D."""

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool | None = None) -> None:
        super().__init__()
        bias = self.biased if bias is None else bias
        self.n_heads = n_heads
        self.d_head = head_width(d_model, n_heads, d_head)
        self.to_q = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_k = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_v = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)

    def heads(self, x: Tensor, rotation: Rotation | None = None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, N, D) to q, k and v, each (B, H, N, D_k), and rotate q and k. dtype: that of the results; None: no cast."""
        return heads_of(x, (self.to_q, self.to_k, self.to_v), self.n_heads, rotation, dtype)
