"""Causal Transformer-VQ: for each code, the state has the sum of the past values whose keys have this code, and their number.

U_t = U_{t-1} + 1_{z_t} v_tᵀ,   L_t = L_{t-1} + 1_{z_t},   o_t = sum_s e_ts U_ts / sum_s e_ts L_ts,   e_ts = exp(q_t . c_s / sqrt(D_k))
z_t is the index of the code nearest to key t, 1_s the unit vector of index s, and c_s code s of Z. Lingle 2023, arXiv:2309.16354,
theorem 3.7, without the paper's position bias for recent keys. It is computed as the recurrence of recurrence.py, with 1_{z_t} as keys
and e_t as queries. O(N (C + Z) D_v) time a head, in chunks of C tokens. The state is [U | L], (H, Z, D_v + 1).
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_cross
from models.attention.layers.causal import EqualHeadsLayer, State, at_least_float32, no_past, with_ones, zero_padding
from models.attention.layers.multi_head import merge_heads
from models.attention.layers.recurrence import Execution, chunkwise
from models.attention.linear.codebook import Codebook, straight_through
from models.attention.linear.vq import VectorQuantisedAttention, mean_of_codes, weights_of_codes
from models.parts.positions import Rotation


def attend_causal_to_codes(
    q: Tensor,
    codes: Tensor,
    v: Tensor,
    codebook: Tensor,
    past: Tensor | None = None,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    products: Tensor | None = None,
    recurrence: Execution = chunkwise,
) -> tuple[Tensor, Tensor]:
    """Attend causally from q to the codes of the keys. Return the outputs o (B, H, N, D_v) and the new [U | L] (B, H, Z, D_v + 1).

    q (B, H, N, D_k), codes int64 (B, H, N), v (B, H, N, D_v), codebook (H, Z, D_k), past: the earlier [U | L], mask bool (B, N): True at
    tokens. products: the dot products of q and the codes (B, H, N, Z), if they are already known. o is 0 in a row without any token so far.
    """
    refuse_cross("causal attention to codes", q=q, codes=codes, v=v)
    exact, Z = at_least_float32(v.dtype), codebook.shape[-2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    past = no_past(v, Z, v.shape[-1] + 1) if past is None else past
    one_hot = zero_padding(F.one_hot(codes, Z).to(exact), mask)  # (B, H, N, Z)
    scores = (q @ codebook.mT if products is None else products).to(exact) * scale
    # L is computed by a cumulative sum of ones, which is exact, and not by the recurrence. So L > 0 exactly for the codes in use.
    e = weights_of_codes(scores, past[..., -1].unsqueeze(-2) + one_hot.cumsum(-2))
    o, S = recurrence(e, one_hot, with_ones(v), past)
    return mean_of_codes(o[..., :-1], o[..., -1:]).to(v.dtype), S


def attend_to_past_and_pairs(q: Tensor, k_hat: Tensor, v: Tensor, S: Tensor, scores: Tensor, *, scale: float) -> Tensor:
    """Compute the outputs of `attend_causal_to_codes` in such a way that every key of this call gets a gradient, in O(N²) time.

    Keys of earlier calls are summed code by code. Keys of this call are scored one by one. q (B, H, N, D_k), k_hat (B, H, N, D_k): the
    quantised keys, v (B, H, N, D_v), S = [U | L] before these tokens, scores (B, H, N, Z) of q and the codes -> (B, H, N, D_v).
    """
    pairs = (q * scale) @ k_hat.mT  # (B, H, N, N)
    seen = torch.ones_like(pairs[0, 0], dtype=torch.bool).tril()
    L = S[..., -1].unsqueeze(-2)  # (B, H, 1, Z)
    either = torch.cat([scores, torch.where(seen, pairs, 0.0)], dim=-1)
    filled = torch.cat([L.expand_as(scores), seen.expand_as(pairs)], dim=-1)
    past, present = weights_of_codes(either, filled).split([scores.shape[-1], pairs.shape[-1]], dim=-1)
    o = past @ S + present @ with_ones(v)
    return mean_of_codes(o[..., :-1], o[..., -1:])


class CausalVectorQuantisedAttention(EqualHeadsLayer):
    """Multi-head causal attention to quantised keys. Its state is S = [U | L], (H, Z, D_v + 1); the counts L are exact up to 2²⁴. In
    training with gradients it computes the scores of all token pairs of a call, in O(N²).
    """

    capabilities = Capabilities.of_recurrence(straight_through=True)
    cost = VectorQuantisedAttention.cost
    examples = replace(VectorQuantisedAttention.examples, varied=None)
    holds = (("S", "sums_in_last_column"),)

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False, n_codes: int = 512) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.n_codes = n_codes
        self.codebook = Codebook(n_heads, n_codes, self.d_head)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.n_heads, self.n_codes, self.d_head + 1)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        S, exact, scale = state["S"], at_least_float32(x.dtype), self.d_head**-0.5
        q, k, v = self.heads(x, dtype=exact)  # (B, H, N, D_k)
        q, k = (F.layer_norm(head, (self.d_head,)) for head in (q, k))
        codes = self.codebook.nearest(k)
        products = self.codebook.products(q)  # (B, H, N, Z)
        o, S_new = attend_causal_to_codes(
            q, codes, v, self.codebook.codes, S, scale=scale, mask=mask, products=products, recurrence=self.recurrence
        )
        if self.training and torch.is_grad_enabled():
            self.codebook.watch(k, codes, mask)
            k_hat = straight_through(k, codes, self.codebook.codes.to(exact))
            o = attend_to_past_and_pairs(q, k_hat, v, S, products.to(exact) * scale, scale=scale)
        return self.to_out(merge_heads(o.to(x.dtype))), {"S": S_new}
