"""Causal FLASH with a state of constant size, token by token exactly what flash.py computes group by group.

Everything is the shared recurrence S_t = exp(a_t) S_{t-1} + k_t w_tᵀ, so that no number depends on how a sequence is cut into calls.
With r = t mod G, the place in the open group, 1_r its unit vector, and a_t = -10⁴ where r = 0, which clears what the last group left:
K_t = [K_{t-1}] + quad_k_t 1_rᵀ   (s, G)   keys of the open group, side by side:   K_tᵀ quad_q_t are the scores of its tokens up to t
V_t = [V_{t-1}] + 1_r v_tᵀ        (G, e)   its values:                             V_quad = V_tᵀ relu(scores / G + b_r)²
P_t = [P_{t-1}] + lin_k_t v_tᵀ    (s, e)   its sum;   M_t = M_{t-1} + lin_k_t v_tᵀ the sum of all groups, the open one included
V_lin = (M_t - P_t)ᵀ lin_q_t / t                                                   [.]: cleared at r = 0
Hua et al. 2022, arXiv:2202.10447, section 4. A token costs O(G (s + e) + s e), and the state is G (s + e) + 2 s e + 1 numbers.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.gated.flash import Divisor, MixedChunkAttention, check_group
from models.attention.gated.gau import DistanceBias, GatedProjections
from models.attention.layers.capabilities import Capabilities, refuse_cross
from models.attention.layers.causal import CausalLayer, State, at_least_float32, zero_padding
from models.attention.layers.recurrence import Execution, chunkwise
from models.parts.positions import Rotation

CLEARED = -1e4  # a log-decay whose exponential is 0 in float64 too, and no infinity, of which differences would be NaN


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
    """V_quad + V_lin: (B, 1, N, s) four times, (B, 1, N, e), bool (B, N) with the tokens at the left -> (B, 1, N, e), K, V, P, M, n.

    past None: no token yet. bias, divisor, quad_divisor: as in `flash.attend_in_groups`.
    """
    refuse_cross("causal FLASH", quad_q=quad_q, quad_k=quad_k, lin_q=lin_q, lin_k=lin_k, v=v)
    exact, given = at_least_float32(v.dtype), v.dtype
    quad_q, quad_k, lin_q, lin_k, v = (x.to(exact) for x in (quad_q, quad_k, lin_q, lin_k, v))
    if past is None:
        past = {name: v.new_zeros(len(v), *shape) for name, shape in shapes_of_past(quad_k.shape[-1], v.shape[-1], group).items()}
    quad_k, lin_k = zero_padding(quad_k, mask), zero_padding(lin_k, mask)
    t = past["n"].long() + torch.arange(v.shape[2], device=v.device)  # (B, N): tokens before each; padding stands at the right
    r = t % group
    place = F.one_hot(r, group).to(exact).unsqueeze(1)  # (B, 1, N, G)
    decay = zero_padding(torch.where(r == 0, CLEARED, 0.0).to(exact).unsqueeze(1), mask)  # (B, 1, N)

    scores, K = recurrence(quad_q, quad_k, place, past["K"], decay=decay)  # (B, 1, N, G)
    scores = scores / (group if quad_divisor is None else quad_divisor)
    A = F.relu(scores if bias is None else scores + bias[r].unsqueeze(1)).square()  # a place that is not yet taken has no value
    quad, V = recurrence(A, zero_padding(place, mask), v, past["V"], decay=decay)

    whole, M = recurrence(lin_q, lin_k, v, past["M"])
    own, P = recurrence(lin_q, lin_k, v, past["P"], decay=decay)
    lin = (whole - own) / ((t + 1).to(exact)[:, None, :, None] if divisor == "tokens" else group)

    n_new = v.shape[2] if mask is None else mask.sum(1, keepdim=True)
    return (quad + lin).to(given), {"K": K, "V": V, "P": P, "M": M, "n": past["n"] + n_new}


def shapes_of_past(s: int, e: int, group: int) -> dict[str, tuple[int, ...]]:
    """Of one sequence."""
    return {"K": (1, s, group), "V": (1, group, e), "P": (1, s, e), "M": (1, s, e), "n": (1,)}


class CausalMixedChunkAttention(GatedProjections, CausalLayer):
    """The causal unit of FLASH without its norm and its residual. Its state is K, V, P and M as above, and n, the tokens seen.

    n is exact up to 2²⁴ tokens. A rotation turns all four maps. relative_bias is that of `MixedChunkAttention`, for the past only.
    """

    capabilities = Capabilities.of_recurrence(rotates=True, ordered=True, averages=False)
    cost = MixedChunkAttention.cost
    examples = replace(MixedChunkAttention.examples, varied=None)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        expansion: int = 2,
        group: int = 256,
        relative_bias: bool = True,
        divisor: Divisor = "tokens",
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias, expansion=expansion, n_maps=4)
        check_group(group)
        self.group = group
        self.divisor: Divisor = divisor
        self.bias = DistanceBias(scale=self.d_head**0.5, causal=True) if relative_bias else None

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes_of_past(self.d_head, self.d_value, self.group)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, state: State | None = None, *, rotation: Rotation | None = None
    ) -> tuple[Tensor, State]:
        state = self.new_state(x) if state is None else state
        u, v, maps = self.projected(x, rotation)
        places = torch.arange(self.group, device=x.device)
        bias = None if self.bias is None else self.bias(places - places[:, None])  # (G, G)
        quad_q, quad_k, lin_q, lin_k = maps
        o, state = attend_causal_in_groups(
            quad_q, quad_k, lin_q, lin_k, v, state, group=self.group, mask=mask, bias=bias, divisor=self.divisor, recurrence=self.recurrence
        )
        return self.gated(u, o), state
