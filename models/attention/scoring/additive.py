"""Additive attention: a network with one hidden layer of A units computes the score of a query and a key.

o_i = sum_j p_ij v_j,   p_i = softmax_j(w_vᵀ tanh(W_q q_i + W_k k_j)),   no biases; queries and keys may have different widths
Bahdanau et al. 2014, arXiv:1409.0473, eqs. 5-6 and appendix A.1.2. O(N_q N_k (A + D_v)) time a head. The hidden layer of all pairs,
N_q N_k A numbers, takes most of the memory, so it is computed for a limited number of queries at a time.
"""

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities, of_nothing
from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.layers.mechanism import Cost
from models.attention.layers.scaled_dot_product import masked_softmax
from models.attention.scoring.scored import ScoredAttention, ScoredHeads

QUERIES_AT_ONCE = 64


def attend_additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    W_q: Tensor,
    W_k: Tensor,
    w_v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    queries_at_once: int | None = QUERIES_AT_ONCE,
) -> Tensor:
    """Compute additive attention: q (B, H, N_q, D_q), k (B, H, N_k, D_k), v (B, H, N_k, D_v) -> (B, H, N_q, D_v).

    W_q (A, D_q), W_k (A, D_k) and w_v (A,); with a first axis H they differ by head. mask, bias: as in `scaled_dot_product.attend`.
    queries_at_once: number of queries computed at a time; None: all.
    """
    return attend_hidden(q @ W_q.mT, k @ W_k.mT, v, w_v=w_v, mask=mask, bias=bias, queries_at_once=queries_at_once)


def attend_hidden(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    w_v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    queries_at_once: int | None = QUERIES_AT_ONCE,
) -> Tensor:
    """Compute additive attention from q (B, H, N_q, A) and k (B, H, N_k, A), which are already multiplied by W_q and W_k."""
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    C = queries_at_once
    if C is None or torch.compiler.is_exporting():  # an exported graph for any N cannot loop over N
        return _attend_all(q, k, v, w_v, mask, bias)
    begins = range(0, q.shape[2], C)
    return torch.cat([_attend_all(q[:, :, i : i + C], k, v, w_v, _rows(mask, i, C), _rows(bias, i, C)) for i in begins], dim=2)


def _attend_all(q: Tensor, k: Tensor, v: Tensor, w_v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    hidden = torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3))  # (B, H, N_q, N_k, A)
    scores = (hidden @ w_v.to(hidden.dtype)[..., None, :, None]).squeeze(-1)  # (B, H, N_q, N_k)
    scores = scores if bias is None else scores + bias
    return masked_softmax(scores, mask) @ v


def _rows(pairs: Tensor | None, begin: int, C: int) -> Tensor | None:
    """Return the rows of C queries from `begin` on, of a tensor that broadcasts to (B, H, N_q, N_k). None stays None."""
    return pairs if pairs is None or pairs.shape[-2] == 1 else pairs[..., begin : begin + C, :]


class LearnedAddition(nn.Module):
    """A module that applies `attend_hidden` with its own parameter w_v (H, A)."""

    def __init__(self, n_heads: int, d_hidden: int, *, queries_at_once: int | None) -> None:
        super().__init__()
        if queries_at_once is not None and queries_at_once < 1:
            raise ValueError(f"queries_at_once={queries_at_once} must be at least 1; None takes all of them at once")
        bound = (6 / (d_hidden + 1)) ** 0.5  # Xavier's bound for a map from A numbers to one
        self.w_v = nn.Parameter(torch.empty(n_heads, d_hidden).uniform_(-bound, bound))
        self.queries_at_once = queries_at_once

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return attend_hidden(q, k, v, w_v=self.w_v, mask=mask, bias=bias, queries_at_once=self.queries_at_once)


class AdditiveHeads(ScoredHeads):
    """Heads with an additive score, whose hidden layer has A = D_k units. The projections to_q and to_k serve as W_q and W_k, and have no
    biases. queries_at_once: number of queries computed at a time; None: all.
    """

    cost = Cost("O(N² (A + D_v) H)", lambda N, s: 2 * N * N * s.D)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool | None = None,
        queries_at_once: int | None = QUERIES_AT_ONCE,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.to_q, self.to_k = (_into_hidden(d_model, n_heads, self.d_head) for _ in range(2))
        self.attend = LearnedAddition(n_heads, self.d_head, queries_at_once=queries_at_once)


class AdditiveAttention(AdditiveHeads, ScoredAttention):
    """Multi-head additive self-attention."""

    capabilities = Capabilities(pairs=True)  # no rotation: the score of a rotated q and k would depend on both positions


def _into_hidden(d_model: int, n_heads: int, d_hidden: int) -> nn.Linear:
    """Return a linear map D -> H A without bias, initialised Xavier-uniform for each head separately."""
    linear, bound = nn.Linear(d_model, n_heads * d_hidden, bias=False), (6 / (d_model + d_hidden)) ** 0.5
    nn.init.uniform_(linear.weight, -bound, bound)
    return linear


class CausalAdditiveAttention(AdditiveHeads, CausalScoredAttention):
    """Multi-head causal additive self-attention."""

    capabilities = Capabilities.of_cache()
