"""Causal FLASH, token by token, with a state of constant size. Its outputs equal those of flash.py, which computes group by group.

All sums are the recurrence S_t = exp(a_t) S_{t-1} + k_t w_tᵀ, so no output depends on how a sequence is cut into calls. With t counted
from 0, token t has the place r = t mod G in its group of G tokens, and 1_r is the unit vector of that place. A group begins at r = 0,
where a_t = -10⁴ clears the states in brackets; at other tokens a_t = 0. Widths: s = D_k, e = D_v.
K_t = [K_{t-1}] + quad_k_t 1_rᵀ   (s, G)   keys of the group, one a column; K_tᵀ quad_q_t are the scores of its tokens up to t
V_t = [V_{t-1}] + 1_r v_tᵀ        (G, e)   values of the group;   V_quad = V_tᵀ relu(scores / G + b_r)²
P_t = [P_{t-1}] + lin_k_t v_tᵀ    (s, e)   sum over the group;   M_t = M_{t-1} + lin_k_t v_tᵀ   sum over all groups, this one included
V_lin = (M_t - P_t)ᵀ lin_q_t / (t + 1)
Hua et al. 2022, arXiv:2202.10447, section 4. A token costs O(G (s + e) + s e), and the state is G (s + e) + 2 s e + 1 numbers.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.gated.flash import Divisor, MixedChunks
from models.attention.layers.capabilities import Capabilities, refuse_cross
from models.attention.layers.causal import CausalLayer, State, at_least_float32, zero_padding
from models.attention.layers.recurrence import Execution, chunkwise
from models.parts.positions import Rotation

CLEARED = -1e4  # log-decay that clears a state: exp(-1e4) is 0 even in float64. It is not -inf, because -inf - (-inf) is NaN


def attend_causal_in_groups(
    quad_q: Tensor,
    quad_k: Tensor,
    lin_q: Tensor,
    lin_k: Tensor,
    v: Tensor,
    past: State | None = None,
    *,
    group: int,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    divisor: Divisor = "tokens",
    quad_divisor: float | None = None,
    recurrence: Execution = chunkwise,
) -> tuple[Tensor, State]:
    """Return V_quad + V_lin (B, 1, N, e), the attention within groups plus the linear attention to earlier groups, and the new state.

    quad_q, quad_k, lin_q, lin_k (B, 1, N, s), v (B, 1, N, e). mask bool (B, N): True at tokens, which are at the left of each row. past:
    the state before these tokens; None: there are no earlier tokens. group: G. bias, divisor, quad_divisor: as in `flash.attend_in_groups`.
    """
    refuse_cross("causal FLASH", quad_q=quad_q, quad_k=quad_k, lin_q=lin_q, lin_k=lin_k, v=v)
    exact, given = at_least_float32(v.dtype), v.dtype
    quad_q, quad_k, lin_q, lin_k, v = (x.to(exact) for x in (quad_q, quad_k, lin_q, lin_k, v))
    if past is None:
        past = {name: v.new_zeros(len(v), *shape) for name, shape in shapes_of_past(quad_k.shape[-1], v.shape[-1], group).items()}
    quad_k, lin_k = zero_padding(quad_k, mask), zero_padding(lin_k, mask)
    t = past["n"].long() + torch.arange(v.shape[2], device=v.device)  # (B, N): number of tokens before each token
    r = t % group
    place = F.one_hot(r, group).to(exact).unsqueeze(1)  # (B, 1, N, G)
    decay = zero_padding(torch.where(r == 0, CLEARED, 0.0).to(exact).unsqueeze(1), mask)  # (B, 1, N)

    scores, K = recurrence(quad_q, quad_k, place, past["K"], decay=decay)  # (B, 1, N, G)
    scores = scores / (group if quad_divisor is None else quad_divisor)
    A = F.relu(scores if bias is None else scores + bias[r].unsqueeze(1)).square()  # A may be positive at empty places, but V is 0 there
    quad, V = recurrence(A, zero_padding(place, mask), v, past["V"], decay=decay)

    whole, M = recurrence(lin_q, lin_k, v, past["M"])
    own, P = recurrence(lin_q, lin_k, v, past["P"], decay=decay)
    lin = (whole - own) / ((t + 1).to(exact)[:, None, :, None] if divisor == "tokens" else group)

    n_new = v.shape[2] if mask is None else mask.sum(1, keepdim=True)
    return (quad + lin).to(given), {"K": K, "V": V, "P": P, "M": M, "n": past["n"] + n_new}


def shapes_of_past(s: int, e: int, group: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each state tensor of one sequence, without the batch axis."""
    return {"K": (1, s, group), "V": (1, group, e), "P": (1, s, e), "M": (1, s, e), "n": (1,)}


class CausalMixedChunkAttention(MixedChunks, CausalLayer):
    """The unit of FLASH for decoders. Its relative bias has buckets for past tokens only. Its state is K, V, P, M (see above) and n, the
    number of past tokens, which is exact up to 2²⁴.
    """

    capabilities = Capabilities.of_recurrence(rotates=True, ordered=True, averages=False)
    examples = replace(MixedChunks.examples, varied=None)
    holds = (("n", "count"),)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes_of_past(self.d_head, self.d_value, self.group)

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        u, v, (quad_q, quad_k, lin_q, lin_k) = self.projected(x, rotation)
        options = self.options(x) | {"mask": mask, "recurrence": self.recurrence}
        o, state = attend_causal_in_groups(quad_q, quad_k, lin_q, lin_k, v, state, **options)
        return self.gated(u, o), state
