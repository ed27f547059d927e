"""Causal hybrid attention: softmax weights in a window and for the first tokens, and feature maps for all tokens between them.

near(t): the first g tokens and t - (W - g) < j <= t, as in sink_window.py;   far(t): g <= j <= t - (W - g), the tokens that left the window
o_t = (sum_{j near} exp(s_tj) v_j + φ_q(q_t)ᵀ S_t) / (sum_{j near} exp(s_tj) + φ_q(q_t)ᵀ z_t),   s_tj = q_tᵀ k_j / √D_k
S_t = sum_{j far} φ_k(k_j) v_jᵀ,   z_t = sum_{j far} φ_k(k_j),   φ_q(q) = exp(W x + b),   φ_k(k) = softmax(W x + b),   x = q or k D_k^(-1/4)
Zhang et al. 2024 (LoLCATs), arXiv:2410.10254, section 3.3, with the maps of Hedgehog (arXiv:2402.04347), initially W = 3 [I, -I]. Unlike
there, the features of a query are not divided by their sum, which says how much weight far tokens get. A far key is rotated as if it had
just left the window (Su 2023, ReRoPE). Up to W tokens this is causal softmax attention. A token costs O((W + D_φ) D_k).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import State, with_ones
from models.attention.layers.mechanism import Cost, Examples
from models.attention.sparse.sink_window import SinkWindowAttention, WindowCall
from models.parts.positions import Rotation, rotate

SHARPNESS = 3.0  # of the initial maps: with 1, 2, 4 and 6 more layers had larger errors after the same training (docs/decisions.md)
LEAST = 1e-30  # added to the sum of all weights, so that it is never 0


def attend_near_and_far(
    q: Tensor, q_first: Tensor, k: Tensor, v: Tensor, far: Tensor, log_scale: Tensor, *, seen: Tensor, is_first: Tensor, has_far: Tensor
) -> Tensor:
    """Attend to near keys by softmax and to the sums of far ones: q, q_first (B, H, N, D_k), k, v (B, H, K, D_k) -> (B, H, N, D_k).

    seen (B, N, K) bool: whether a query sees a key; is_first (B, K) bool: a first token's key, to whose score q_first belongs. far (B, H,
    N, D_k + 1): the sums of the far values and of the weights, divided by exp(log_scale), log_scale (B, H, N, 1). has_far (B, N) bool: the
    query has far tokens. All far keys together are one key of the softmax, whose score is log_scale.
    """
    scores = torch.where(is_first[:, None, None], q_first @ k.mT, q @ k.mT) * q.shape[-1] ** -0.5  # (B, H, N, K)
    scores = scores.masked_fill(~seen.unsqueeze(1), torch.finfo(scores.dtype).min)
    one_more = log_scale.masked_fill(~has_far[:, None, :, None], torch.finfo(log_scale.dtype).min)
    p = torch.softmax(torch.cat([scores, one_more], dim=-1), dim=-1) * torch.cat([seen, has_far.unsqueeze(-1)], dim=-1).unsqueeze(1)
    return mixed(p[..., :-1] @ with_ones(v), p[..., -1:], far)


def mixed(near: Tensor, share: Tensor, far: Tensor) -> Tensor:
    """Return the weighted mean of near and far values: (.., D_k + 1) -> (.., D_k). The last column is the sum of the weights. share (..,
    1): the factor of the far sums.
    """
    sums = near + share * far
    return sums[..., :-1] / (sums[..., -1:] + LEAST)


class ExponentMap(nn.Module):
    """The exponents W x + b of the features of every head, D_φ = 2 D_k of them."""

    def __init__(self, n_heads: int, d_head: int, *, bias: float = 0.0) -> None:
        super().__init__()
        self.scale = d_head**-0.25
        identity = torch.eye(d_head)
        self.weight = nn.Parameter(SHARPNESS * torch.cat([identity, -identity]).repeat(n_heads, 1, 1))  # (H, D_φ, D_k)
        self.bias = nn.Parameter(torch.full((n_heads, 1, 2 * d_head), bias))

    def forward(self, x: Tensor) -> Tensor:
        """Return the exponents: q or k (B, H, N, D_k) -> (B, H, N, D_φ)."""
        return x @ (self.weight.to(x.dtype) * self.scale).mT + self.bias.to(x.dtype)


def query_features(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return φ_q(q) / exp(m) and m (.., 1), the largest exponent of a query: exponents (.., D_φ)."""
    m = exponents.amax(-1, keepdim=True).detach()
    return (exponents - m).exp(), m


class CausalHybridAttention(SinkWindowAttention):
    """Multi-head causal hybrid attention, with the options of `SinkWindowAttention`. Its state is that of the window, with S = W + piece +
    1 slots, and [S | z], (H_k, D_φ, D_k + 1), to which the features of a key are added when it leaves the window.
    """

    capabilities = Capabilities(causal=True, cross=False, state="constant", rotates=True, weights="sums", ordered=True)
    cost = Cost("O(N (w + m) D)", lambda N, s: 2 * N * (s.window + 2 * s.D_k) * s.D)
    examples = Examples({"window": 6, "n_first": 2, "piece": 4}, {"window": 128, "n_first": 4, "piece": 127}, {"window": 5, "n_first": 1})

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        window: int = 256,
        n_first: int = 4,
        piece: int = 255,
        counted: bool = True,
        n_kv_heads: int | None = None,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        grouped: dict[str, Any] = {"n_kv_heads": n_kv_heads, "out_bias": out_bias, "qk_norm": qk_norm, "norm_eps": norm_eps}
        sizes: dict[str, Any] = {"window": window, "n_first": n_first, "piece": piece, "counted": counted}
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias, **sizes, **grouped)
        self.draw_maps()

    def draw_maps(self) -> None:
        """Replace the feature maps by new ones, with their initial values."""
        self.phi_q = ExponentMap(self.n_heads, self.d_head, bias=-math.log(self.n_features))
        self.phi_k = ExponentMap(self.n_kv_heads, self.d_head)

    @property
    def n_features(self) -> int:
        """D_φ."""
        return 2 * self.d_head

    @property
    def n_slots(self) -> int:
        """S: one more than in the window alone, so that after a call the key that its first token lets go is still there."""
        return self.window + self.piece + 1

    @property
    def n_near(self) -> int:
        """The number of recent tokens that a token sees, W - g: token j leaves the window at token j + W - g."""
        return self.window - self.n_first

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return super().state_shapes | {"S": (self.n_kv_heads, self.n_features, self.d_head + 1)}

    def _attend(self, heads: Sequence[Tensor], mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        call = self.call(heads, state, rotation)
        left = call.t - self.n_near  # (B, N), the position of the token that leaves the window at each token
        k, v = self._at(left, call)
        k = k if rotation is None else rotate(k, rotation._replace(sin=-rotation.sin))  # as if t were 0
        is_far = left >= self.n_first
        phi_q, m = query_features(self.phi_q(heads[0]))
        phi_k = self.phi_k(k).softmax(-1) * (is_far if mask is None else is_far & mask)[:, None, :, None]
        every = self.for_every_head
        far, S = self.recurrence(phi_q, every(phi_k), every(with_ones(v)), every(state["S"]))
        o = attend_near_and_far(
            call.q, call.q_first, every(call.keys), every(call.values), far, m, seen=call.seen, is_first=call.is_first, has_far=is_far
        )
        return o, self.kept(call, mask, state) | {"S": S[:, :: self.n_heads // self.n_kv_heads]}

    def _at(self, positions: Tensor, call: WindowCall) -> tuple[Tensor, Tensor]:
        """Return the keys and values (B, H_k, N, D_k) of the tokens at `positions` (B, N), which are in the state or the call. A position
        before the first token gives those of any token."""
        first, n_slots = call.t[:, :1], call.keys.shape[2] - call.t.shape[1]
        at = torch.where(positions < first, self.slots_of(positions.clamp_min(0), positions >= 0), n_slots + positions - first)
        at = at[:, None, :, None].expand(-1, call.keys.shape[1], -1, call.keys.shape[3])
        return call.keys.gather(2, at), call.values.gather(2, at)
