"""Causal efficient attention: every column of the keys is a softmax over the past, and the query chooses among these D_k means.

o_t = sum_d softmax(q_t)_d S_t[d] / z_t[d],   S_t[d] = sum_{j <= t} exp(k_jd) v_j,   z_t[d] = sum_{j <= t} exp(k_jd)
The causal form of Shen et al. 2018, arXiv:1812.01243. It is not φ(q)ᵀS / φ(q)ᵀz: each column is divided by its own sum, so z is needed at
every token, before S is asked. Both are kept as multiples of exp(m_t[d]), m_t the largest k_d so far, which is a decay for each row of S:
z is the same recurrence with a head for each column. O(N C D_k + N D_k D_v) time a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, of_nothing, refuse_cross
from models.attention.layers.causal import EqualHeadsLayer, State, at_least_float32, no_past, zero_padding
from models.attention.layers.mechanism import cost_of_state
from models.attention.layers.multi_head import merge_heads
from models.attention.layers.recurrence import Execution, chunkwise
from models.attention.layers.running_max import of_tokens, running_max
from models.parts.positions import Rotation


class ColumnSums(NamedTuple):
    """What a head keeps of its past; zeros before the first token."""

    S: Tensor  # (B, H, D_k, D_v), over exp(m)
    z: Tensor  # (B, H, D_k), over exp(m); at least 1 after a token
    m: Tensor  # (B, H, D_k)


def attend_causal_efficient(
    q: Tensor, k: Tensor, v: Tensor, past: ColumnSums | None = None, *, mask: Tensor | None = None, recurrence: Execution = chunkwise
) -> tuple[Tensor, ColumnSums]:
    """(B, H, N, D_k), same, (B, H, N, D_v), bool (B, N) with the tokens at the left -> (B, H, N, D_v), what is kept of them.

    past None: zeros.
    """
    refuse_cross("causal efficient attention", q=q, k=k, v=v)
    if past is None:
        D_k = k.shape[-1]
        past = ColumnSums(no_past(v, D_k, v.shape[-1]), no_past(v, D_k), no_past(v, D_k))
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing, past
    exact = at_least_float32(v.dtype)
    k = of_tokens(k.to(exact), mask)
    m, decay, m_last = running_max(k, mask, past.m, past.z > 0)
    weight = zero_padding((k - m).exp(), mask)  # not 0 at padding before any token
    z, z_last = _sums_of_columns(weight, decay, past.z, recurrence)
    rho = torch.softmax(q.to(exact), dim=-1) / z.clamp(min=1)  # z < 1 is z = 0: padding before any token
    o, S = recurrence(rho, weight, v.to(exact), past.S, decay=decay)
    return o.to(v.dtype), ColumnSums(S, z_last, m_last)


def _sums_of_columns(x: Tensor, decay: Tensor, z: Tensor, recurrence: Execution) -> tuple[Tensor, Tensor]:
    """z_t = exp(a_t) z_{t-1} + x_t: (B, H, N, D_k), same, (B, H, D_k) -> (B, H, N, D_k), the last of them. A head of width 1 a column."""

    def as_heads(y: Tensor) -> Tensor:
        return y.transpose(2, 3).flatten(1, 2).unsqueeze(-1)  # (B, H D_k, N, 1)

    ones = torch.ones_like(x)
    z_t, last = recurrence(as_heads(ones), as_heads(x), as_heads(ones), z.flatten(1, 2)[..., None, None], decay=as_heads(decay).squeeze(-1))
    return z_t.squeeze(-1).unflatten(1, z.shape[1:]).transpose(2, 3), last.flatten(1).unflatten(1, z.shape[1:])


class CausalEfficientAttention(EqualHeadsLayer):
    """Multi-head causal efficient attention. Its state is S (H, D_k, D_v), z (H, D_k) and m (H, D_k).

    A rotation turns q and k in front of their softmaxes; a weight then depends on both positions, and not on their distance alone.
    """

    capabilities = Capabilities.of_recurrence(rotates=True)
    cost = cost_of_state("O(N D²)", lambda s: s.D_k)
    settles = ("m",)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        rows = (self.n_heads, self.d_head)
        return {"S": (*rows, self.d_head), "z": rows, "m": rows}

    def forward(
        self, x: Tensor, mask: Tensor | None = None, state: State | None = None, *, rotation: Rotation | None = None
    ) -> tuple[Tensor, State]:
        state = self.new_state(x) if state is None else state
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        o, past = attend_causal_efficient(q, k, v, ColumnSums(**state), mask=mask, recurrence=self.recurrence)
        return self.to_out(merge_heads(o).to(x.dtype)), past._asdict()
