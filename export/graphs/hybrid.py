"""Hybrid attention as one attention operator: the far tokens of a block become D_φ keys, which its queries see beside the near keys.

z_d is the sum of φ_k,d over the far tokens of a block, S_d the sum of φ_k,d v, and s_ij = q̂_iᵀ k_j with q̂ = q / √D_k. Then o_i is softmax
attention to the near keys, with scores s_ij and values v_j, and to a key for each feature d, with score log φ_q,d(q_i) + log g z_d and
value S_d / z_d. With the map `positive`, that score is a dot product too, because the other terms are columns of q and k:

    query       [q̂,               0,     1,               |q̂|²     ]
    near key    [k,               |k|²,  0,               0        ]
    absent key  [0,               10³⁰,  -10³⁰,           0        ]
    feature d   [W_d √D_k,        0,     b_d + log g z_d, -√D_k / 2]    W_d and b_d of the map of q, for q that is not scaled

The column of |k|² is for φ_k, which is a product of the same rows with W of the map of k. Rows are gathered from the packed tokens, so that
nothing is padded or transposed. The equations are those of `models.attention.linear.hybrid`. Figures: docs/decisions.md.
"""

import math
from typing import TypeGuard

import torch
from torch import Tensor, nn

from export.graphs.compact import one, operator
from export.graphs.token_packing import TokenPacking
from models.attention.linear.hybrid import HybridAttention

ABSENT = 1e30  # far above all scores and squares; sums of a few of it are finite


def is_compact(layer: nn.Module) -> TypeGuard[HybridAttention]:
    """Return whether `CompactHybrid` can compute the layer: it has near tokens, features that are exponentials, and float32 weights."""
    return isinstance(layer, HybridAttention) and layer.block > 0 and layer.phi_q.has_log and layer.to_q.weight.dtype == torch.float32


class CompactHybrid(nn.Module):
    """`HybridAttention` on packed tokens, (T, D) -> (T, D), for the export only. Outputs of texts without tokens are undefined."""

    W_k: Tensor  # (H, D_k + 3, D_φ)
    W_q: Tensor  # (H, 1, D_φ, D_k + 1)
    bias: Tensor  # (H, 1, D_φ)
    of_square: Tensor  # (H, 1, D_φ, 1)
    absent_key: Tensor  # (1, D_k + 3)
    constants: Tensor  # (1, 1, 2)

    def __init__(self, layer: HybridAttention) -> None:
        super().__init__()
        self.layer = layer
        D_k, scale = layer.d_head, layer.d_head**-0.5
        self.to_q = _scaled(layer.to_q, scale)
        W_q, W_k = (phi.weight.detach() * phi.scale for phi in (layer.phi_q, layer.phi_k))  # (H, D_φ, D_k)
        zero, one = torch.zeros_like(W_q[..., :1]), torch.ones_like(W_q[..., :1])
        bias = layer.phi_q.bias + layer.phi_k.bias - math.log(W_q.shape[1]) + layer.log_gain
        self.register_buffer("W_k", torch.cat([W_k, -scale / 2 * one, zero, zero], dim=-1).mT.contiguous())
        self.register_buffer("W_q", torch.cat([W_q / scale, zero], dim=-1)[:, None].contiguous())
        self.register_buffer("bias", bias.detach().contiguous())
        self.register_buffer("of_square", (-one / (2 * scale))[:, None].contiguous())
        self.register_buffer("absent_key", torch.tensor([[0.0] * D_k + [ABSENT, -ABSENT, 0.0]]))
        self.register_buffer("constants", torch.tensor([[[0.0, 1.0]]]))

    def forward(self, x: Tensor, packing: TokenPacking, **pairs: Tensor | None) -> Tensor:
        layer, H, D_phi = self.layer, self.layer.n_heads, self.W_k.shape[-1]
        (B, N), T = packing.mask.shape, x.shape[0]
        C = torch.sym_min(layer.block, (N + 1) // 2)  # as in `attend_hybrid`
        n = (N + C - 1) // C
        q, k, v = (to(x).unflatten(1, (H, -1)) for to in (self.to_q, layer.to_k, layer.to_v))  # (T, H, D_k)
        constants = self.constants.expand(T, H, 2)
        q = torch.cat([q, constants, _square(q)], dim=-1).flatten(0, 1)  # (T H, D_k + 3)
        k = torch.cat([k, _square(k), torch.zeros_like(constants)], dim=-1).flatten(0, 1)
        k, v = torch.cat([k, self.absent_key]), v.flatten(0, 1)  # row T H is the absent key
        of_tokens, of_keys = _rows_of_blocks(packing, n * C - N, H)  # (B, H, n C)

        log_phi = _gathered(k, of_keys) @ self.W_k  # (B, H, n C, D_φ): log φ_k without its constants, which are in `self.bias`
        largest = log_phi.amax(2, keepdim=True)  # (B, H, 1, D_φ)
        phi = (log_phi - largest).exp().unflatten(2, (n, C))
        S = _beyond_neighbours(phi.mT @ _gathered(v, of_tokens).unflatten(2, (n, C)))  # (B, H, n, D_φ, D_k)
        z = _beyond_neighbours(phi.sum(3, keepdim=True))  # (B, H, n, 1, D_φ)
        is_any = z > torch.finfo(z.dtype).tiny
        z = torch.where(is_any, z, 1.0)
        bias = torch.where(is_any, z.log() + (largest + self.bias).unsqueeze(2), -ABSENT).mT  # (B, H, n, D_φ, 1)
        far = torch.cat([self.W_q.expand(*bias.shape[:4], -1), bias, self.of_square.expand_as(bias)], dim=-1)
        keys, values = torch.cat([k, far.flatten(0, 3)]), torch.cat([v, (S / z.mT).flatten(0, 3)])

        near = _near(of_keys, n, C, absent=T * H)  # (B, H, n, 2 C or 3 C)
        n_far = torch.sym_max(0, torch.sym_min(n - 2, 1)) * D_phi  # 0 if no token is far
        of_far = torch.arange(B * H * n).view(B, H, n, 1) * D_phi + torch.arange(n_far) + T * H  # rows of `values`
        of_values = torch.cat([near.clamp(max=T * H - 1), of_far], dim=3)  # an absent key has the weight 0, so its value is any
        o = operator(
            "MultiHeadAttention",
            [
                _gathered(q, of_tokens).view(-1, C, q.shape[1]),  # (B H n, C, D_k + 3)
                _gathered(keys, torch.cat([near, of_far + 1], dim=3)).flatten(0, 2),
                _gathered(values, of_values).flatten(0, 2),
            ],
            [(B * H * n, C, layer.d_head)],
            num_heads=1,
            scale=1.0,
        )[0].flatten(0, 1)  # (B H n C, D_k)
        first = packing.position + packing.position // N * (H * n * C - N)  # (T,): the row of each token's first head
        places = first[:, None] + torch.arange(H) * (n * C)
        return layer.to_out(_gathered(o, places).flatten(1))


def _rows_of_blocks(packing: TokenPacking, more: int, H: int) -> tuple[Tensor, Tensor]:
    """Return the row among T H of every position of the blocks, twice: (B, H, N + more). The second has T H where there is no token."""
    row = nn.functional.pad(packing.row.unflatten(0, packing.mask.shape), (0, more))
    rows = row[:, None] * H + torch.arange(H)[:, None]
    return rows, torch.where(nn.functional.pad(packing.mask, (0, more))[:, None], rows, packing.position.shape[0] * H)


def _near(rows: Tensor, n: int, C: int, *, absent: int) -> Tensor:
    """Return the rows of the keys that each of n blocks of C sees, of up to three blocks: (B, H, n C) -> (B, H, n, 3 C), or 2 C for n = 2.

    The first and the last block see two blocks: the rows of their third are `absent`.
    """
    seen = torch.sym_min(n, 3)
    block = torch.arange(n)[:, None]
    start = (block - 1).clamp(min=0).minimum(torch.zeros_like(block) + (n - seen))
    at = start * C + torch.arange(seen * C)  # (n, 3 C)
    near = rows.index_select(2, at.flatten()).unflatten(2, at.shape)
    return torch.where((at // C - block).abs() <= 1, near, absent)


def _gathered(x: Tensor, at: Tensor) -> Tensor:
    """Return rows of x (R, D): at (..) -> (.., D)."""
    return x.index_select(0, at.flatten()).unflatten(0, at.shape)


def _scaled(projection: nn.Linear, scale: float) -> nn.Linear:
    """Return the projection with outputs multiplied by `scale`."""
    scaled = nn.Linear(projection.in_features, projection.out_features, bias=projection.bias is not None, device="meta")
    scaled.weight = nn.Parameter(projection.weight.detach() * scale)
    if projection.bias is not None:
        scaled.bias = nn.Parameter(projection.bias.detach() * scale)
    return scaled


def _square(x: Tensor) -> Tensor:
    """Return |x|²: (.., D) -> (.., 1)."""
    return one("ReduceSumSquare", [x, torch.tensor([-1])], (*x.shape[:-1], 1), keepdims=1)


def _beyond_neighbours(x: Tensor) -> Tensor:
    """Compute `models.attention.linear.hybrid.beyond_neighbours` by two exclusive sums over blocks, one of them from the end."""
    padded = nn.functional.pad(x, (0, 0, 0, 0, 1, 1))
    left, right = (one("CumSum", [padded, torch.tensor(2)], padded.shape, exclusive=1, reverse=end) for end in (0, 1))
    return left[:, :, : x.shape[2]] + right[:, :, 2:]
