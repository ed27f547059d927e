"""FLASH: a gated unit with exact attention inside each group of G tokens, and linear attention, by sums, between groups.

quad_q, quad_k, lin_q, lin_k: four affine maps of z (gau.py);   y = (u ⊙ (V_quad + V_lin)) W_o,   for a token of group g
V_quad = relu(quad_q quad_kᵀ / G + b)² V_g                          within the group
V_lin  = lin_q (sum over all groups of lin_kᵀ V) / n                not causal; n is the number of unmasked tokens, or G
V_lin  = lin_q (sum over the groups before g of lin_kᵀ V) / t       causal; t is the number of tokens up to this one, itself included, or G
Hua et al. 2022, arXiv:2202.10447, section 4. O(N G (s + e) + N s e) time, s = D_k, e = D_v. Two units replace one transformer block.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.gated.gau import DistanceBias, GatedProjections
from models.attention.layers.capabilities import Capabilities, of_nothing, refuse_cross
from models.attention.layers.encoder import EncoderLayer
from models.attention.layers.mechanism import ComplexityRow, Cost, Examples
from models.parts.positions import Rotation

Divisor = Literal["tokens", "group"]


def attend_in_groups(
    quad_q: Tensor,
    quad_k: Tensor,
    lin_q: Tensor,
    lin_k: Tensor,
    v: Tensor,
    *,
    group: int,
    causal: bool = False,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    divisor: Divisor = "tokens",
    quad_divisor: float | None = None,
) -> Tensor:
    """Return V_quad + V_lin (B, 1, N, e): attention within groups, plus linear attention to all groups or, if causal, earlier groups.

    quad_q, quad_k, lin_q, lin_k (B, 1, N, s), v (B, 1, N, e). key_mask bool (B, N): True at tokens. group: G. bias: b (G, G). divisor:
    V_lin is divided by the number of unmasked tokens that the query sees (`tokens`), or by G (`group`). quad_divisor: the divisor of the
    scores within a group; None: G. The last group may be shorter than G.
    """
    refuse_cross("FLASH", quad_q=quad_q, quad_k=quad_k, lin_q=lin_q, lin_k=lin_k, v=v)
    if (nothing := of_nothing(quad_q, quad_k, v)) is not None:
        return nothing
    N, given, exact = v.shape[2], v.dtype, torch.promote_types(v.dtype, torch.float32)  # float16 counts exactly only up to 2,048
    quad_q, quad_k, lin_q, lin_k, v = (x.to(exact) for x in (quad_q, quad_k, lin_q, lin_k, v))
    seen = torch.ones_like(v[:, 0, :, 0]) if key_mask is None else key_mask.to(exact)  # (B, N)
    v = v * seen[:, None, :, None]  # a masked key adds 0 to V_quad and V_lin
    C = torch.sym_min(group, N)  # a sequence shorter than a group is not padded to a whole group
    quad_q, quad_k, lin_q, lin_k, v = (_in_groups(x, C) for x in (quad_q, quad_k, lin_q, lin_k, v))  # (B, 1, groups, C, ..)
    scores = quad_q @ quad_k.mT / (group if quad_divisor is None else quad_divisor)
    A = F.relu(scores if bias is None else scores + bias[:C, :C]).square()
    sums = lin_k.mT @ v  # (B, 1, groups, s, e)
    sums = sums.cumsum(2) - sums if causal else sums.sum(2, keepdim=True)
    n_seen = (seen.cumsum(1) if causal else seen.sum(1, keepdim=True)).clamp_min(1)[:, None, :, None]  # (B, 1, N or 1, 1)
    quad = ((A.tril() if causal else A) @ v).flatten(2, 3)[:, :, :N]
    lin = (lin_q @ sums).flatten(2, 3)[:, :, :N]
    return (quad + lin / (n_seen if divisor == "tokens" else group)).to(given)


def _in_groups(x: Tensor, group: int) -> Tensor:
    """Split into groups, the last one filled up with zeros: (B, 1, N, D) -> (B, 1, groups, G, D)."""
    N = x.shape[2]
    return F.pad(x, (0, 0, 0, (N + group - 1) // group * group - N)).unflatten(2, (-1, group))


class MixedChunks(GatedProjections):
    """The unit of FLASH without its norm and residual, so that it can replace an attention layer. A rotation is applied to all four maps.

    relative_bias: T5's relative bias, times sqrt(s), is added to the scores within a group. Raises ValueError if group is less than 2.
    """

    cost = Cost(  # A token takes part in G pairs, and in two products with a matrix of s e numbers, where e = 2 D.
        "O(N G D + N D s)",
        lambda N, s: N * s.group * (s.D_k + 2 * s.D) + 4 * N * s.D_k * s.D,
        ComplexityRow("FLASH group G", "O(1)", "O(N / G) causal"),
    )
    examples = Examples({"group": 4}, {"group": 256}, {"group": 8}, ("group", (64, 128, 256, 512)))

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool | None = None,
        expansion: int = 2,
        group: int = 256,
        relative_bias: bool = True,
        divisor: Divisor = "tokens",
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias, expansion=expansion, n_maps=4)
        if group < 2:
            raise ValueError(f"group={group} must be at least 2 tokens, because a group of 1 token needs no attention")
        self.group = group
        self.divisor: Divisor = divisor
        self.bias = DistanceBias(scale=self.d_head**0.5, causal=self.capabilities.causal) if relative_bias else None

    def options(self, x: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of `attend_in_groups` and `attend_causal_in_groups`: group, bias (G, G) and divisor."""
        r = torch.arange(self.group, device=x.device)
        return {"group": self.group, "bias": None if self.bias is None else self.bias(r - r[:, None]), "divisor": self.divisor}


class MixedChunkAttention(MixedChunks, EncoderLayer):
    """The unit of FLASH for encoders: exact attention within each group of tokens, and linear attention to all tokens."""

    capabilities = Capabilities(cross=False, rotates=True, ordered=True, averages=False, pads_to="group", weights="sums")

    def mix(self, x: Tensor, key_mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        u, v, (quad_q, quad_k, lin_q, lin_k) = self.projected(x, rotation)
        return self.gated(u, attend_in_groups(quad_q, quad_k, lin_q, lin_k, v, key_mask=key_mask, **self.options(x)))
