"""Causal Synthesizer: each token computes scores for all positions from itself alone, and weights the values up to its own position.

o_t = sum_{j <= t} p_tj v_j,   p_t = softmax over j <= t of L_tj,   L as in synthesizer.py
Tay et al. 2020, arXiv:2005.00743, section 3. The state holds the values of N_max positions, H N_max D_v numbers. With the dot
product it also holds the keys, H N_max D_k more. A token costs O(N_max D_v) a head, however long its past is.
"""

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import CausalLayer, State, at_least_float32
from models.attention.layers.mechanism import Cost, Examples
from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.scoring.synthesizer import SynthesizerHeads, attend_by_scores
from models.attention.scoring.synthesizer_scores import KINDS
from models.parts.positions import Rotation


class CausalSynthesizer(SynthesizerHeads, CausalLayer):
    """Multi-head causal Synthesizer, with the options of `Synthesizer`. Raises ValueError for more than n_positions tokens. Its state is v
    (H, N_max, D_v), n, the number of tokens, and for the dot product k, of the shape of v.
    """

    capabilities = Capabilities(causal=True, cross=False, state="bounded", ordered=True)
    cost = Cost("O(N N_max D)", lambda N, s: 2 * N * s.n_positions * s.D)
    examples = Examples({"kinds": KINDS, "n_positions": 140, "rank": 3})

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        places = (self.n_heads, self.n_positions, self.d_head)
        return {"v": places, "n": (1,)} | ({"k": places} if "dot_product" in self.scores.kinds else {})

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        exact = at_least_float32(x.dtype)
        n = state["n"].long()  # (B, 1)
        lengths = torch.full_like(n, x.shape[1]) if mask is None else mask.sum(1, keepdim=True)
        self._check_room(n + lengths)
        new = {"v": _stored(state["v"], split_heads(self.to_v(x), self.n_heads).to(exact), n, lengths)}
        k = self.scores.keys(x)
        if k is not None:
            k = new["k"] = _stored(state["k"], k.to(exact), n, lengths)
        places = torch.arange(self.n_positions, device=x.device)
        t = (n + torch.arange(x.shape[1], device=x.device)).clamp_max(self.n_positions - 1)  # (B, N); only padding is clamped
        scores = self.scores(x, t, k, self.n_positions).to(exact)  # (B, H, N, N_max)
        o = attend_by_scores(scores, new["v"], mask=places <= t[:, None, :, None])
        return self.to_out(merge_heads(o).to(x.dtype)), new | {"n": state["n"] + lengths}

    def _check_room(self, n: Tensor) -> None:
        if not torch.compiler.is_exporting() and self.n_positions < (longest := int(n.max())):
            raise ValueError(f"{longest} tokens, but the Synthesizer has scores for n_positions={self.n_positions}; use a shorter text")


def _stored(places: Tensor, x: Tensor, n: Tensor, lengths: Tensor) -> Tensor:
    """Write x (B, H, N, D_v) to the positions n .. n + lengths - 1 of each row of `places` (B, H, N_max, D_v). n, lengths: (B, 1)."""
    token = torch.arange(places.shape[2], device=x.device) - n  # (B, N_max): index of the token of x at each position
    is_new = (token >= 0) & (token < lengths)
    source = token.clamp(0, x.shape[2] - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return torch.where(is_new[:, None, :, None], x.gather(2, source), places)
