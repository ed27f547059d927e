"""Causal LSH attention with a cache: a token sees the past tokens that share a bucket with it in some round of hashing.

o_t = sum_j p_tj v_j,   p_t = softmax of q_t . k_j over j <= t with h_r(j) = h_r(t) for some r,   k_j = q_j / |q_j|
h_r(j) is the bucket of q_j in round r of R. The score of the token itself is -10^5. Kitaev et al. 2020, arXiv:2001.04451, eqs. 3-6. There
are no chunks, because their places depend on future tokens. The t-th token costs O(t (D_k + R)) a head.
"""

import math

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_cross
from models.attention.layers.causal import CausalLayer, State, at_least_float32
from models.attention.layers.mechanism import Cost, Examples
from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.layers.scaled_dot_product import masked_softmax
from models.attention.sparse.lsh import EPS, SELF_LOGIT, HashedHeads, unit_keys
from models.attention.sparse.lsh_buckets import Buckets, angular_buckets, factors_of
from models.parts.positions import Rotation

NOWHERE = -1.0  # the bucket number of padding
MOST_BUCKETS = 2**24  # states are float32, which represents all integers up to this number


def attend_lsh_to_cache(
    qk: Tensor,
    v: Tensor,
    buckets: Tensor,
    state: State | None = None,
    *,
    scale: float = 1.0,
    self_logit: float = SELF_LOGIT,
    eps: float = EPS,
) -> tuple[Tensor, State]:
    """Attend to the cache and the new tokens. Return the outputs (B, H, N, D_v) and the state with N more slots: qk (B, H, N, D_k), v (B,
    H, N, D_v), buckets as floats (B, H, N, R). No token sees one in bucket -1, which is padding.
    """
    new = {"qk": qk, "v": v, "buckets": buckets}
    refuse_cross("causal LSH attention", **new)
    state = new if state is None else {name: torch.cat([state[name], x], dim=2) for name, x in new.items()}  # (B, H, t + N, ..)
    slots = torch.arange(state["qk"].shape[2], device=qk.device)
    own = slots[-qk.shape[2] :, None]  # (N, 1)
    shared = torch.zeros((), dtype=torch.bool, device=qk.device)
    for here, there in zip(buckets.unbind(-1), state["buckets"].unbind(-1), strict=True):  # one round of hashing after the other
        shared = shared | (here.unsqueeze(-1) == there.unsqueeze(-2))  # (B, H, N, t + N)
    scores = scale * (qk @ unit_keys(state["qk"], eps=eps).mT).to(qk.dtype)  # a cast, as autocast gives float16, where -10^5 overflows
    scores = torch.where(slots == own, self_logit, scores)
    return masked_softmax(scores, shared & (slots <= own)) @ state["v"], state


class CausalLSHAttention(HashedHeads, CausalLayer):
    """Multi-head causal LSH attention. Its state is qk, v and buckets (as floats), each with one more slot for every token of a call. There
    is no to_k, because keys are the queries scaled to length 1. Raises ValueError if n_buckets is too large for float32.
    """

    capabilities = Capabilities.of_cache(weights="pattern")
    cost = Cost("O(N² (D + R H))", lambda N, s: 2 * N * N * s.D)
    examples = Examples({"n_buckets": 2})

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        n_rounds: int = 4,
        n_buckets: Buckets = 32,
        scale: float = 1.0,
        self_logit: float = SELF_LOGIT,
        eps: float = EPS,
        seed: int = 0,
    ) -> None:
        if (product := math.prod(factors_of(n_buckets))) > MOST_BUCKETS:
            raise ValueError(f"n_buckets={n_buckets} are {product} buckets, more than {MOST_BUCKETS}; take smaller factors")
        super().__init__(d_model, n_heads, d_head, bias, n_rounds, n_buckets, seed)
        self.n_rounds = n_rounds
        self.options = {"scale": scale, "self_logit": self_logit, "eps": eps}

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        slots = (self.n_heads, 0, self.d_head)
        return {"qk": slots, "v": slots, "buckets": (self.n_heads, 0, self.n_rounds)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        exact = at_least_float32(x.dtype)
        qk = split_heads(self.to_q(x), self.n_heads).to(exact)  # (B, H, N, D_k)
        v = split_heads(self.to_v(x), self.n_heads).to(exact)
        buckets = angular_buckets(qk, self.rotations, self.n_buckets).mT.to(exact)  # (B, H, N, R)
        if mask is not None:
            buckets = torch.where(mask[:, None, :, None], buckets, NOWHERE)
        o, state = attend_lsh_to_cache(qk, v, buckets, state, **self.options)
        return self.to_out(merge_heads(o.to(x.dtype))), state
