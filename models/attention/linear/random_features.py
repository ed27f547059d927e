"""Random features that estimate an exponential: the feature maps, the random matrix W, and a base class for layers that hold W.

The kernels are defined in performer.py. W (D_r, D_k) has entries drawn from N(0, 1), and by default orthogonal rows. A training loop calls
`redraw_features(model, step)` before each step. Choromanski et al. 2020 (FAVOR+), arXiv:2009.14794, lemma 1 and sections 2.3 and 2.4.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.multi_head import EqualHeads

REDRAW_STEPS = 1000
Kernel = Literal["positive", "hyperbolic", "relu"]
KERNELS = ("positive", "hyperbolic", "relu")
Rows = Literal["orthogonal", "iid", "regularised"]
ROWS = ("orthogonal", "iid", "regularised")


def draw_projection(n_rows: int, d_head: int, generator: torch.Generator, *, rows: Rows = "orthogonal") -> Tensor:
    """Draw W (D_r, D_k), float32, with D_r = n_rows and D_k = d_head. rows: `iid` (all entries independent), `orthogonal` (every D_k rows
    orthogonal, with the lengths of `iid`) or `regularised` (orthogonal, of length √D_k).
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if rows == "iid":
        return normal(n_rows, d_head).float()
    blocks = [_rotation(normal(d_head, d_head)) for _ in range(-(-n_rows // d_head))]
    lengths = normal(n_rows, d_head).norm(dim=-1, keepdim=True) if rows == "orthogonal" else math.sqrt(d_head)
    return (torch.cat(blocks)[:n_rows] * lengths).float()


def _rotation(gaussian: Tensor) -> Tensor:
    """Return orthonormal rows in uniformly random directions: Qᵀ of the QR decomposition, with signs that make R's diagonal positive."""
    Q, R = torch.linalg.qr(gaussian)
    return (Q * R.diagonal().sign()).mT


def default_features(d_head: int) -> int:
    """Return the default number of rows of W, D_k ln D_k rounded, as in section 4 of Choromanski et al. 2020."""
    return max(1, round(d_head * math.log(d_head)))


def log_features(x: Tensor, projection: Tensor, *, kernel: Kernel = "positive", scale: float | None = None) -> Tensor:
    """Return log φ(x) of `positive`, `hyperbolic`: x (B, H, N, D_k), W (D_r, D_k) or (H, D_r, D_k) -> (B, H, N, D_φ), float32 at least."""
    projected = project(x, projection, kernel=kernel, scale=scale)
    return projected - (half_square(x, scale) + math.log(projected.shape[-1]) / 2)


def project(x: Tensor, projection: Tensor, *, kernel: Kernel = "positive", scale: float | None = None, tokens_last: bool = False) -> Tensor:
    """Return the part of log φ(x) that differs between features, W x' or [W x', -W x']: x (B, H, N, D_k), W (D_r, D_k) or (H, D_r, D_k) ->
    (B, H, N, D_φ), float32 at least. tokens_last: return (B, H, D_φ, N).
    """
    x = _scaled(x, scale)
    W = projection.to(x.dtype)
    projected = (W @ x.mT if tokens_last else x @ W.mT).to(x.dtype)  # a cast, because under autocast the product is in half precision
    if kernel == "hyperbolic":
        projected = torch.cat([projected, -projected], dim=-2 if tokens_last else -1)
    return projected


def half_square(x: Tensor, scale: float | None = None) -> Tensor:
    """Return |x'|²/2: x (B, H, N, D_k) -> (B, H, N, 1), float32 at least."""
    x = _scaled(x, scale)
    return (x * x).sum(-1, keepdim=True) / 2


def relu_features(x: Tensor, projection: Tensor, *, scale: float | None = None, relu_eps: float = 1e-3) -> Tensor:
    """Return the features of the kernel `relu`: x (B, H, N, D_k), W (D_r, D_k) or (H, D_r, D_k) -> (B, H, N, D_r), float32 at least."""
    x = _scaled(x, scale)
    return F.relu((x @ projection.to(x.dtype).mT).to(x.dtype)) + relu_eps


def _scaled(x: Tensor, scale: float | None) -> Tensor:
    scale = x.shape[-1] ** -0.5 if scale is None else scale
    return x.to(torch.promote_types(x.dtype, torch.float32)) * math.sqrt(scale)


class RandomFeatures(EqualHeads):
    """A base class for layers with random features. All heads share one W, the buffer `projection` (D_r, D_k)."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool | None = None,
        n_features: int | None = None,
        kernel: Kernel = "positive",
        rows: Rows = "orthogonal",
        seed: int = 0,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.kernel, self.rows = checked(kernel, rows, n_features)
        self.projection: Tensor
        self.register_buffer("projection", torch.empty(n_features or default_features(self.d_head), self.d_head))  # (D_r, D_k)
        self.redraw(torch.Generator().manual_seed(seed))

    def redraw(self, generator: torch.Generator) -> None:
        """Replace W by a new random matrix of the same kind, in place. The generator must be on the CPU."""
        self.projection.copy_(draw_projection(self.projection.shape[0], self.projection.shape[1], generator, rows=self.rows))


def redraw_features(model: nn.Module, step: int, *, every: int = REDRAW_STEPS) -> None:
    """Draw a new W for every layer of `model` if `step`, which is the seed, is a multiple of `every`."""
    if step > 0 and step % every == 0:
        generator = torch.Generator().manual_seed(step)
        for module in model.modules():
            if isinstance(module, RandomFeatures):
                module.redraw(generator)


def checked(kernel: Kernel, rows: Rows, n_features: int | None) -> tuple[Kernel, Rows]:
    """Return `kernel` and `rows`. Raises ValueError if either name is unknown or if n_features < 1."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is not one of {', '.join(KERNELS)}")
    if rows not in ROWS:
        raise ValueError(f"rows={rows!r} is not one of {', '.join(ROWS)}")
    if n_features is not None and n_features < 1:
        raise ValueError(f"n_features={n_features} must be at least 1, or None for D_k ln D_k")
    return kernel, rows
