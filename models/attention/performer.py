"""Performer: random features whose products have the exponential of softmax attention as their mean, so that linear attention estimates it.

x' = x √scale, scale = D_k^-1/2:   φ(q)ᵀφ(k) is, on average over W, exp(scale qᵀk), for
positive     φ(x) = exp(W x' - |x'|²/2) / √D_r                                D_φ = D_r
hyperbolic   φ(x) = [exp(W x' - |x'|²/2), exp(-W x' - |x'|²/2)] / √(2 D_r)    D_φ = 2 D_r, less variance
relu         φ(x) = max(W x', 0) + 1e-3, another kernel and no estimate       D_φ = D_r
then linear attention. W is (D_r, D_k), drawn from N(0, 1) a number, with orthogonal rows unless told otherwise.
Choromanski et al. 2020 (FAVOR+), arXiv:2009.14794, lemma 1 and sections 2.3 and 2.4. O(N D_φ (D_k + D_v)) time a head.

The estimate of exp is unbiased, that of the weights, a quotient, is not; and its variance is small for short q and k only.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.capabilities import Capabilities, refuse_pairs
from models.attention.linear import attend_features
from models.attention.multi_head import EqualHeads, merge_heads, split_heads
from models.positions import Rotation, rotate

Kernel = Literal["positive", "hyperbolic", "relu"]
KERNELS = ("positive", "hyperbolic", "relu")
Rows = Literal["orthogonal", "iid", "regularised"]
ROWS = ("orthogonal", "iid", "regularised")


def draw_projection(n_rows: int, d_head: int, generator: torch.Generator, *, rows: Rows = "orthogonal") -> Tensor:
    """W (D_r, D_k), float32. iid: every number for itself. orthogonal: rows in blocks of D_k at right angles, as long as iid ones.
    regularised: at right angles and of length √D_k each.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if rows == "iid":
        return normal(n_rows, d_head).float()
    blocks = [_rotation(normal(d_head, d_head)) for _ in range(-(-n_rows // d_head))]
    lengths = normal(n_rows, d_head).norm(dim=-1, keepdim=True) if rows == "orthogonal" else math.sqrt(d_head)
    return (torch.cat(blocks)[:n_rows] * lengths).float()


def _rotation(gaussian: Tensor) -> Tensor:
    """Orthonormal rows that point everywhere alike: the Q of a square Gaussian matrix, with the signs that make R's diagonal positive."""
    Q, R = torch.linalg.qr(gaussian)
    return (Q * R.diagonal().sign()).mT


def default_features(d_head: int) -> int:
    """D_r = D_k ln D_k, section 4 of the paper."""
    return max(1, round(d_head * math.log(d_head)))


def log_features(x: Tensor, projection: Tensor, *, kernel: Kernel = "positive", scale: float | None = None) -> Tensor:
    """log φ of the two exponential kernels: (B, H, N, D_k), W (D_r, D_k) or (H, D_r, D_k) -> (B, H, N, D_φ), float32 at least."""
    x = _scaled(x, scale)
    projected = (x @ projection.to(x.dtype).mT).to(x.dtype)  # autocast would leave half precision
    if kernel == "hyperbolic":
        projected = torch.cat([projected, -projected], dim=-1)
    return projected - (x * x).sum(-1, keepdim=True) / 2 - math.log(projected.shape[-1]) / 2


def relu_features(x: Tensor, projection: Tensor, *, scale: float | None = None, relu_eps: float = 1e-3) -> Tensor:
    """The third kernel: (B, H, N, D_k), W (D_r, D_k) or (H, D_r, D_k) -> (B, H, N, D_r), float32 at least."""
    x = _scaled(x, scale)
    return F.relu((x @ projection.to(x.dtype).mT).to(x.dtype)) + relu_eps


def _scaled(x: Tensor, scale: float | None) -> Tensor:
    scale = x.shape[-1] ** -0.5 if scale is None else scale
    return x.to(torch.promote_types(x.dtype, torch.float32)) * math.sqrt(scale)


def attend_performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    key_mask: Tensor | None = None,
    kernel: Kernel = "positive",
    scale: float | None = None,
    eps: float = 1e-6,
    relu_eps: float = 1e-3,
) -> Tensor:
    """(B, H, N_q, D_k), (B, H, N_k, D_k), (B, H, N_k, D_v), W, bool (B, N_k) -> (B, H, N_q, D_v); 0 without any key.

    scale None: D_k^-1/2. eps is in the denominator only.
    """
    if kernel == "relu":
        phi_q, phi_k = (relu_features(x, projection, scale=scale, relu_eps=relu_eps) for x in (q, k))
    else:
        phi_q, phi_k = balanced_features(*(log_features(x, projection, kernel=kernel, scale=scale) for x in (q, k)), key_mask)
    return attend_features(phi_q, phi_k, v, key_mask=key_mask, eps=eps)


def balanced_features(log_q: Tensor, log_k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k) up to a factor for each query, which cancels: (B, H, N_q, D_φ), (B, H, N_k, D_φ) -> the same shapes, in 0 .. 1.

    c_d, the largest of column d over the keys, moves from the keys to the queries, exp(log_q + c) · exp(log_k - c), and of each query its
    largest exponent is taken away. So φ(q)ᵀz >= 1 wherever there is a key, however long q and k are.
    """
    least = torch.finfo(log_k.dtype).min
    if key_mask is not None:
        log_k = torch.where(key_mask[:, None, :, None], log_k, least)
    c = log_k.amax(-2, keepdim=True).detach()  # (B, H, 1, D_φ)
    c = torch.where(c > least, c, 0.0)
    log_q = log_q + c
    return (log_q - log_q.amax(-1, keepdim=True).detach()).exp(), (log_k - c).exp()


class PerformerAttention(EqualHeads):
    """Multi-head self-attention by random features, with the projections of `SoftmaxAttention`, which it estimates.

    W, `projection` (D_r, D_k), is one for all heads; a training run draws it anew now and then (the paper: every 1,000 steps) by `redraw`.
    """

    capabilities = Capabilities(rotates=True)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = True,
        n_features: int | None = None,
        kernel: Kernel = "positive",
        rows: Rows = "orthogonal",
        seed: int = 0,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.kernel, self.rows = checked(kernel, rows, n_features)
        self.register_buffer("projection", torch.empty(n_features or default_features(self.d_head), self.d_head))  # (D_r, D_k)
        self.redraw(torch.Generator().manual_seed(seed))

    def redraw(self, generator: torch.Generator) -> None:
        """Another W of the same kind, in place. The generator is one of the CPU."""
        self.projection.copy_(draw_projection(*self.projection.shape, generator, rows=self.rows))

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        pair_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D), bool (B, N) -> (B, N, D)."""
        refuse_pairs("the Performer", None, pair_mask, pair_bias)
        q = split_heads(self.to_q(x), self.n_heads)  # (B, H, N, D_k)
        k = split_heads(self.to_k(x), self.n_heads)
        v = split_heads(self.to_v(x), self.n_heads)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return self.to_out(merge_heads(attend_performer(q, k, v, self.projection, key_mask=key_mask, kernel=self.kernel)))


def checked(kernel: Kernel, rows: Rows, n_features: int | None) -> tuple[Kernel, Rows]:
    """The first two. Raises ValueError for a name that is unknown, and for D_r < 1."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is not one of {', '.join(KERNELS)}")
    if rows not in ROWS:
        raise ValueError(f"rows={rows!r} is not one of {', '.join(ROWS)}")
    if n_features is not None and n_features < 1:
        raise ValueError(f"n_features={n_features} must be at least 1, or None for D_k ln D_k")
    return kernel, rows
