"""Additive attention: a small network with one hidden layer of A units says how well a key matches a query.

o_i = sum_j p_ij v_j,   p_i = softmax_j(w_vᵀ tanh(W_q q_i + W_k k_j)),   no biases; queries and keys may be of different widths
Bahdanau et al. 2014, arXiv:1409.0473, eqs. 5-6 and appendix A.1.2. O(N_q N_k (A + D_v)) time a head. The hidden layer of all pairs, N_q N_k
A numbers, is what fills the memory: it is made for some of the queries at a time.
"""

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities, of_nothing
from models.attention.layers.mechanism import Cost
from models.attention.layers.scaled_dot_product import masked_softmax
from models.attention.scoring.scored import ScoredAttention

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
    """(B, H, N_q, D_q), (B, H, N_k, D_k), (B, H, N_k, D_v) -> (B, H, N_q, D_v).

    W_q (A, D_q), W_k (A, D_k) and w_v (A,), or with H in front for weights a head. mask, bias: as in `scaled_dot_product.attend`.
    queries_at_once: None for all.
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
    """`attend_additive` of W_q q (B, H, N_q, A) and W_k k (B, H, N_k, A), which a source that is asked again is multiplied with once."""
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    C = queries_at_once
    if C is None or torch.compiler.is_exporting():  # a graph for every N has no loop over N
        return _attend_all(q, k, v, w_v, mask, bias)
    begins = range(0, q.shape[2], C)
    return torch.cat([_attend_all(q[:, :, i : i + C], k, v, w_v, _rows(mask, i, C), _rows(bias, i, C)) for i in begins], dim=2)


def _attend_all(q: Tensor, k: Tensor, v: Tensor, w_v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    hidden = torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3))  # (B, H, N_q, N_k, A)
    scores = (hidden @ w_v.to(hidden.dtype)[..., None, :, None]).squeeze(-1)  # (B, H, N_q, N_k)
    scores = scores if bias is None else scores + bias
    return (torch.softmax(scores, dim=-1) if mask is None else masked_softmax(scores, mask)) @ v


def _rows(pairs: Tensor | None, begin: int, C: int) -> Tensor | None:
    """Those of C queries of a tensor that broadcasts to (B, H, N_q, N_k)."""
    return pairs if pairs is None or pairs.shape[-2] == 1 else pairs[..., begin : begin + C, :]


class LearnedAddition(nn.Module):
    """`attend_hidden` with a w_v (H, A) of its own."""

    def __init__(self, n_heads: int, d_hidden: int, *, queries_at_once: int | None) -> None:
        super().__init__()
        if queries_at_once is not None and queries_at_once < 1:
            raise ValueError(f"queries_at_once={queries_at_once} must be at least 1; None takes all of them at once")
        bound = (6 / (d_hidden + 1)) ** 0.5  # Xavier's, of a map from A numbers to one
        self.w_v = nn.Parameter(torch.empty(n_heads, d_hidden).uniform_(-bound, bound))
        self.queries_at_once = queries_at_once

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return attend_hidden(q, k, v, w_v=self.w_v, mask=mask, bias=bias, queries_at_once=self.queries_at_once)


class AdditiveAttention(ScoredAttention):
    """Multi-head additive self-attention, A = D_k.

    W_q and W_k of a head are its rows of to_q and to_k: another projection in front of them would be one linear map with them. So these two
    have no bias, whatever `bias` says of to_v and to_out. queries_at_once: how many meet all keys at a time; None: all.
    """

    capabilities = Capabilities(pairs=True)  # w_vᵀ tanh(q + k) of a turned q and a turned k knows more of them than their distance
    cost = Cost("O(N² (A + D_v) H)", lambda N, s: 2 * N * N * s.D)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = True,
        queries_at_once: int | None = QUERIES_AT_ONCE,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.to_q, self.to_k = (into_hidden(d_model, n_heads, self.d_head) for _ in range(2))
        self.attend = LearnedAddition(n_heads, self.d_head, queries_at_once=queries_at_once)


def into_hidden(d_model: int, n_heads: int, d_hidden: int) -> nn.Linear:
    """D -> H A without bias; Xavier-uniform for each head by itself."""
    linear, bound = nn.Linear(d_model, n_heads * d_hidden, bias=False), (6 / (d_model + d_hidden)) ** 0.5
    nn.init.uniform_(linear.weight, -bound, bound)
    return linear
