"""Computes two properties of a layer's effective matrix: its rank for each head width, and how many stacked layers are needed
until every output depends on every token.

The layers are built with their options for short texts and computed in float64, on random tokens of variance 1.
"""

import torch
from torch import Tensor

from export.comparison.mechanisms import build, is_attention
from models.attention.layers.mechanism import Mechanism
from models.maps.matrix import attention_matrix
from models.maps.rank import effective_rank


def ranks(name: str, N: int, widths: tuple[int, ...], n_heads: int) -> dict[int, float]:
    """Return the mean effective rank of the effective matrix (N, N) for each head width D_k, with D = H D_k. {} if it is no attention."""
    if not is_attention(name):
        return {}
    found = {width: matrix(name, N, d_model=n_heads * width, n_heads=n_heads) for width in widths}
    return {width: float(effective_rank(A).double().mean()) for width, A in found.items()}


def matrix(name: str, N: int, *, d_model: int, n_heads: int) -> Tensor:
    """Return the effective matrix (H, N, N) in float64 for N random tokens."""
    layer = build(name, d_model, n_heads, longest=N, short=True).double()
    assert isinstance(layer, Mechanism)
    return attention_matrix(layer, _tokens(1, N, d_model))[0]


def layers_to_reach(name: str, N: int, d_model: int, n_heads: int) -> int:
    """Return how many layers, stacked with residual connections, are needed until every output depends on every token, or for causal layers
    on every earlier token. Returns 0 if no number of layers is enough.
    """
    met = (matrix(name, N, d_model=d_model, n_heads=n_heads) != 0).any(0) if is_attention(name) else _dependencies(name, N, d_model)
    step = met | torch.eye(N, dtype=torch.bool)
    causal = not step.triu(1).any()
    wanted = torch.ones(N, N, dtype=torch.bool).tril() if causal else torch.ones(N, N, dtype=torch.bool)
    reached, layers = step, 1
    while not reached[wanted].all():
        further = (reached.double() @ step.double()) > 0
        if torch.equal(further, reached):
            return 0
        reached, layers = further, layers + 1
    return layers


def _dependencies(name: str, N: int, D: int) -> Tensor:
    """Return a bool matrix (N, N): entry [i, j] is True if output i depends on token j, by gradients: a finite difference would lose
    a small influence in rounding."""
    layer = build(name, D, 1, longest=N, short=True).double()
    x = _tokens(1, N, D).requires_grad_()
    y = layer(x, torch.ones(1, N, dtype=torch.bool))[0]
    direction = _tokens(1, 1, D)[0, 0]  # a random direction, because the sum of a normalised output would be constant
    rows = [torch.autograd.grad(output @ direction, x, retain_graph=True)[0][0] for output in y]  # N gradients, (N, D) each
    return (torch.stack(rows) != 0).any(-1)


def _tokens(B: int, N: int, D: int) -> Tensor:
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
