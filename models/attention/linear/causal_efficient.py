"""Causal efficient attention: each of the D_k key columns gives a mean of the past values, and the query weights these D_k means.

o_t = sum_d softmax(q_t)_d S_t[d] / z_t[d],   S_t[d] = sum_{j <= t} exp(k_jd) v_j,   z_t[d] = sum_{j <= t} exp(k_jd)
The causal form of Shen et al. 2018, arXiv:1812.01243. S_t[d] and z_t[d] are stored divided by exp(m_t[d]), where m_t[d] is the largest k_jd
so far; when it rises, both decay (running_max.py). O(N C D_k + N D_k D_v) time a head, in chunks of C tokens.
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
    """The state of causal efficient attention. It is zeros before the first token."""

    S: Tensor  # (B, H, D_k, D_v), sums of exp(k_jd) v_j, divided by exp(m)
    z: Tensor  # (B, H, D_k), sums of exp(k_jd), divided by exp(m); at least 1 after a token
    m: Tensor  # (B, H, D_k), the largest k_jd so far


def attend_causal_efficient(
    q: Tensor, k: Tensor, v: Tensor, past: ColumnSums | None = None, *, mask: Tensor | None = None, recurrence: Execution = chunkwise
) -> tuple[Tensor, ColumnSums]:
    """Return the outputs o (B, H, N, D_v) and the new state: q, k (B, H, N, D_k), v (B, H, N, D_v). past: the state before these tokens.
    mask bool (B, N): True at tokens, which are at the left of each row.
    """
    refuse_cross("causal efficient attention", q=q, k=k, v=v)
    if past is None:
        D_k = k.shape[-1]
        past = ColumnSums(no_past(v, D_k, v.shape[-1]), no_past(v, D_k), no_past(v, D_k))
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing, past
    exact = at_least_float32(v.dtype)
    k = of_tokens(k.to(exact), mask)
    m, decay, m_last = running_max(k, past.m, past.z > 0)
    weight = zero_padding((k - m).exp(), mask)  # masked, because k - m is 0 at padding in a row without a token
    z, z_last = _sums_of_columns(weight, decay, past.z, recurrence)
    rho = torch.softmax(q.to(exact), dim=-1) / z.clamp(min=1)  # z < 1 only at padding in a row without a token, where z = 0
    o, S = recurrence(rho, weight, v.to(exact), past.S, decay=decay)
    return o.to(v.dtype), ColumnSums(S, z_last, m_last)


def _sums_of_columns(x: Tensor, decay: Tensor, z: Tensor, recurrence: Execution) -> tuple[Tensor, Tensor]:
    """Return z_t = exp(a_t) z_{t-1} + x_t for all tokens, (B, H, N, D_k), and the last z_t: x (B, H, N, D_k), log-decays (B, H, N, D_k), z
    (B, H, D_k). Each column is a sequence of one head of width 1, because as heads its numbers would be far apart in memory.
    """

    def as_sequences(y: Tensor) -> Tensor:
        return y.transpose(2, 3).flatten(0, 2)[:, None, :, None]  # (B H D_k, 1, N, 1)

    x_columns = as_sequences(x)
    ones = torch.ones_like(x_columns)
    past = z.flatten()[:, None, None, None]
    z_t, last = recurrence(ones, x_columns, ones, past, decay=as_sequences(decay).squeeze(-1))
    return z_t.flatten(1).unflatten(0, z.shape).transpose(2, 3), last.flatten().unflatten(0, z.shape)


class CausalEfficientAttention(EqualHeadsLayer):
    """Multi-head causal efficient attention. Its state is S (H, D_k, D_v), z (H, D_k) and m (H, D_k).

    A rotation is applied to q and k before their softmaxes, so a weight depends on both positions and not on their distance alone.
    """

    capabilities = Capabilities.of_recurrence(rotates=True)
    cost = cost_of_state("O(N D²)", lambda s: s.D_k)
    settles = ("m",)
    holds = (("z", "sums"),)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        rows = (self.n_heads, self.d_head)
        return {"S": (*rows, self.d_head), "z": rows, "m": rows}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        o, past = attend_causal_efficient(q, k, v, ColumnSums(**state), mask=mask, recurrence=self.recurrence)
        return self.to_out(merge_heads(o).to(x.dtype)), past._asdict()
