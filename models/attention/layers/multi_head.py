"""What multi-head layers share: projections of tokens to H heads, and of the heads' answers back to tokens."""

import torch
from torch import Tensor, nn

from models.attention.layers.mechanism import Mechanism
from models.parts.positions import Rotation, rotate


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """(B, N, H * D_k) -> (B, H, N, D_k)."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, D_k) -> (B, N, H * D_k)."""
    return x.transpose(1, 2).flatten(-2)


def head_width(d_model: int, n_heads: int, d_head: int | None) -> int:
    """D_k: as given, or D / H. Raises ValueError when D does not divide into H."""
    if d_head is None and d_model % n_heads:
        raise ValueError(
            f"d_model={d_model} is not divisible by n_heads={n_heads}; give d_head, or change one of them",
        )
    return d_head or d_model // n_heads


def both_masks(key_mask: Tensor | None, pair_mask: Tensor | None) -> Tensor | None:
    """Keys that exist (B, N_k) and pairs that may meet (N_q, N_k), as one mask that broadcasts to (B, H, N_q, N_k)."""
    if key_mask is None:
        return pair_mask
    keys_B11N = key_mask[:, None, None, :]
    return keys_B11N if pair_mask is None else keys_B11N & pair_mask


class EqualHeads(Mechanism):
    """H heads equally wide in q, k and v: `to_q`, `to_k` and `to_v` are D -> H * D_k, `to_out` is H * D_k -> D."""

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.d_head = head_width(d_model, n_heads, d_head)
        self.to_q = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_k = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_v = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)

    def heads(self, x: Tensor, rotation: Rotation | None = None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, D) -> q, k, v, (B, H, N, D_k) each, q and k turned by the rotation. dtype None: that of the projections."""
        q, k, v = (split_heads(to(x), self.n_heads) for to in (self.to_q, self.to_k, self.to_v))
        if dtype is not None:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)
