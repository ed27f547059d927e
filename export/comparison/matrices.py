"""Computes two properties of a layer's effective matrix: its rank for each head width, and how many stacked layers are needed
until every output depends on every token.

The layers are built with their options for short texts and computed in float64, on random tokens of variance 1.
"""

import torch
from torch import Tensor

from export.comparison.mechanisms import build, is_attention
from export.comparison.plan import ComparisonPlan
from export.comparison.results import Rank
from models.attention.layers.mechanism import Mechanism
from models.maps.matrix import attention_matrix
from models.maps.rank import effective_rank, numerical_rank


def ranks(name: str, plan: ComparisonPlan) -> list[Rank]:
    """Return the ranks of the effective matrix for each head width D_k, with D = H D_k. Returns [] for layers that are not attention."""
    if not is_attention(name):
        return []
    found = []
    for d_head in plan.rank_widths:
        A = matrix(name, plan.rank_length, d_model=plan.n_heads * d_head, n_heads=plan.n_heads)
        found.append(Rank(d_head=d_head, numerical=_mean(numerical_rank(A)), effective=_mean(effective_rank(A))))
    return found


def matrix(name: str, N: int, *, d_model: int, n_heads: int) -> Tensor:
    """Return the effective matrix (H, N, N) in float64 for N random tokens."""
    layer = build(name, d_model, n_heads, longest=N, short=True).double()
    assert isinstance(layer, Mechanism)
    return attention_matrix(layer, _tokens(1, N, d_model))[0]


def layers_to_reach(name: str, plan: ComparisonPlan) -> int:
    """Return how many layers, stacked with residual connections, are needed until every output depends on every token, or for causal layers
    on every earlier token. Returns 0 if no number of layers is enough.
    """
    N, D = plan.rank_length, plan.d_model
    met = (matrix(name, N, d_model=D, n_heads=plan.n_heads) != 0).any(0) if is_attention(name) else _reference_support(name, N, D)
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


def _reference_support(name: str, N: int, D: int) -> Tensor:
    """Return a bool matrix (N, N): entry [i, j] is True if output i depends on token j.

    It is computed from gradients, because a finite difference would lose a small influence in rounding.
    """
    layer = build(name, D, 1, longest=N, short=True).double()
    x = _tokens(1, N, D).requires_grad_()
    y = layer(x, torch.ones(1, N, dtype=torch.bool))[0]
    direction = _tokens(1, 1, D)[0, 0]  # a random direction, because the sum of a normalised output would be constant
    rows = [torch.autograd.grad(output @ direction, x, retain_graph=True)[0][0] for output in y]  # N gradients, (N, D) each
    return (torch.stack(rows) != 0).any(-1)


def _tokens(B: int, N: int, D: int) -> Tensor:
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
