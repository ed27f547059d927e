"""Causal gated attention unit with a cache of keys and values: the unit of gau.py, in which a token sees itself and its past.

A_tj = relu(q_t . k_j / sqrt(s) + b_{t-j})² / t for j <= t (`valid`), or a softmax over them,   y_t = (u_t ⊙ sum_j A_tj v_j) W_o
Hua et al. 2022, arXiv:2202.10447, section 3. The t-th token costs O(t (s + e)); the cache holds t (s + e) numbers (s = D_k, e = D_v).
The normalisation `length` is not available: it divides by the length of the whole sequence, which a decoder does not know.
"""

from dataclasses import replace

from torch import Tensor

from models.attention.gated.gau import DistanceBias, GatedAttentionUnit, GatedProjections, Normalisation, weights
from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import CausalLayer, State
from models.attention.layers.causal_scored import remember, seen
from models.parts.positions import Rotation

CAUSAL_NORMALISATIONS = ("valid", "softmax", "softmax_plus")


class CausalGatedAttentionUnit(GatedProjections, CausalLayer):
    """The GAU for decoders, without its norm and residual.

    Its state is that of `CausalSoftmaxAttention` for one head: k (1, t, s), v (1, t, e) and filled (t,).
    Raises ValueError for a normalisation that is not in CAUSAL_NORMALISATIONS.
    """

    capabilities = Capabilities.of_cache(rotates=True, ordered=True, averages=False)
    cost = GatedAttentionUnit.cost

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        expansion: int = 2,
        normalisation: Normalisation = "valid",
        relative_bias: bool = True,
        least_length: int = 1,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias, expansion=expansion, n_maps=2)
        if normalisation not in CAUSAL_NORMALISATIONS:
            raise ValueError(f"normalisation={normalisation!r} is not one of {', '.join(CAUSAL_NORMALISATIONS)}, which have a causal form")
        self.normalisation = normalisation
        self.capabilities = replace(self.capabilities, averages=normalisation in ("softmax", "softmax_plus"))
        self.least_length = least_length
        self.bias = DistanceBias(scale=d_model**0.5, causal=True) if relative_bias else None

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"k": (1, 0, self.d_head), "v": (1, 0, self.d_value), "filled": (0,)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        u, v, (q, k) = self.projected(x, rotation)
        state = remember(k, v, mask, state)
        bias = None if self.bias is None else self.bias(_distances(state["filled"], n_new=x.shape[1]))
        A = weights(
            q,
            state["k"],
            normalisation=self.normalisation,
            mask=seen(state["filled"], n_new=x.shape[1]),
            bias=bias,
            least_length=self.least_length,
        )
        return self.gated(u, A @ state["v"]), state


def _distances(filled: Tensor, *, n_new: int) -> Tensor:
    """Return key position - query position, int64 (B, 1, N, t + N), for N = n_new new tokens and all slots.

    filled (B, t + N): 1 in slots with a token, 0 in empty slots, which do not count for positions.
    """
    t = filled.cumsum(1).long()  # (B, t + N): the position of the token in each slot, counted from 1
    own = t[:, -n_new:] if n_new else t[:, :0]
    return (t[:, None, :] - own[:, :, None]).unsqueeze(1)
