"""The dense reference of the attentions with a fixed pattern: every pair is asked for by itself, and an N x N mask is formed."""

from collections.abc import Callable

import torch
from torch import Tensor

from models.attention.layers.scaled_dot_product import attend

EXACT = 1e-10  # float64: the same formula, summed in another order
ROUNDED = 1e-5  # float32
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 33)  # around blocks of 8 tokens

Sees = Callable[[int, int], bool]


def mask_of(sees: Sees, N: int) -> Tensor:
    """(N, N) bool: which query i sees which key j."""
    return torch.tensor([[sees(i, j) for j in range(N)] for i in range(N)])


def dense(q: Tensor, k: Tensor, v: Tensor, pattern: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Softmax over the pairs of a mask that broadcasts to (B, H, N, N)."""
    mask = pattern if key_mask is None else pattern & key_mask[:, None, None, :]
    return attend(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)


def heads(N: int, *, B: int = 2, H: int = 2, D: int = 4, n: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """n tensors (B, H, N, D): q, k, v and so on."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, N, D, generator=generator, dtype=torch.float64).to(dtype) for _ in range(n)]


def some_keys(N: int) -> Tensor:
    """bool (2, N): a row with padding and a hole, and a row of padding only."""
    mask = torch.arange(N) < max(N - 2, 1)
    if N > 4:
        mask[2] = False
    return torch.stack([mask, torch.zeros(N, dtype=torch.bool)])


def check(fast: Callable[..., Tensor], sees: Sees | Tensor, N: int) -> None:
    """In both precisions, with all keys and with some."""
    pattern = sees if isinstance(sees, Tensor) else mask_of(sees, N)
    for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, ROUNDED)):
        q, k, v = heads(N, dtype=dtype)
        for mask in (None, some_keys(N)):
            assert (fast(q, k, v, key_mask=mask) - dense(q, k, v, pattern, mask)).abs().max() <= tolerance
