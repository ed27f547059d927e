"""Transformer-VQ: keys are rounded to the codes of a codebook, and softmax attention over rounded keys is exact at linear cost.

k^_j = c_{z_j},   z_j = argmin_s ||k_j - c_s||²,   o_i = softmax_j(scale q_i . k^_j) V = sum_s e_is U_s / sum_s e_is L_s
e_is = exp(scale q_i . c_s),   U_s = sum of the values with code s,   L_s = how many they are,   scale = D_k^-1/2
Lingle 2023, arXiv:2309.16354, section 3. q and k are layer-normed, as there; the paper's gates are left out, its position bias is a
function of its own (vq_near.py).
O(N Z D_k) time a head for Z codes, and no N x N matrix. The codebook is no parameter: it follows the keys by moving means (codebook.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_pairs
from models.attention.layers.mechanism import Examples, Row, cost_of_state
from models.attention.layers.multi_head import EqualHeads, merge_heads, split_heads
from models.attention.layers.scaled_dot_product import attend
from models.attention.linear.codebook import Codebook, straight_through
from models.parts.positions import Rotation


def attend_to_codes(
    q: Tensor, codes: Tensor, v: Tensor, codebook: Tensor, *, scale: float | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """(B, H, N_q, D_k), int64 (B, H, N_k), (B, H, N_k, D_v), (H, Z, D_k), bool (B, N_k) -> (B, H, N_q, D_v); 0 without any key.

    scale None: D_k^-1/2.
    """
    exact = torch.promote_types(v.dtype, torch.float32)  # U and L grow like N: a half-precision sum would stall
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    one_hot = F.one_hot(codes, codebook.shape[-2]).to(exact)  # (B, H, N_k, Z)
    if key_mask is not None:
        one_hot = one_hot * key_mask[:, None, :, None]
    U = one_hot.mT @ v.to(exact)  # (B, H, Z, D_v)
    L = one_hot.sum(-2)  # (B, H, Z)
    e = weights_of_codes((q @ codebook.mT).to(exact) * scale, L.unsqueeze(-2))  # (B, H, N_q, Z)
    return mean_of_codes(e @ U, e @ L.unsqueeze(-1)).to(v.dtype)


def weights_of_codes(scores: Tensor, L: Tensor) -> Tensor:
    """e: exp of scores (.., N_q, Z) over the largest score among the codes with L > 0, and 0 for those without a key; L (.., N_q or 1, Z).

    A code that nobody has must not be that largest one: beside its score all others might underflow.
    """
    scores = torch.where(L > 0, scores, torch.finfo(scores.dtype).min)
    return torch.exp(scores - scores.amax(-1, keepdim=True)) * (L > 0)


def mean_of_codes(weighted: Tensor, total: Tensor) -> Tensor:
    """sum e U / sum e L: (.., D_v), (.., 1) -> (.., D_v), 0 where there was no key. A total is otherwise at least 1."""
    return weighted / (total + (total == 0))


class VectorQuantisedAttention(EqualHeads):
    """Multi-head attention to rounded keys, with the projections of `SoftmaxAttention` and a codebook of n_codes codes a head.

    Where gradients are taken in training, scores are formed pair by pair, in O(N²): only there has a key of its own a gradient, which is
    that of its code (straight-through). The numbers are the same. See codebook.py for the two calls that a training loop makes.
    """

    capabilities = Capabilities(straight_through=True, weights="sums")
    cost = cost_of_state("O(N S D)", lambda s: 2 * s.n_codes, Row("VQ S", "O(1)", "O(1) parallel, O(N) step"))
    examples = Examples({"n_codes": 7}, {"n_codes": 512}, {"n_codes": 16}, ("n_codes", (64, 128, 256, 512)))

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True, n_codes: int = 512) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.codebook = Codebook(n_heads, n_codes, self.d_head)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        pair_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D), bool (B, N) -> (B, N, D)."""
        refuse_pairs("vector-quantised attention", rotation, pair_mask, pair_bias)
        q = F.layer_norm(split_heads(self.to_q(x), self.n_heads), (self.d_head,))  # (B, H, N, D_k)
        k = F.layer_norm(split_heads(self.to_k(x), self.n_heads), (self.d_head,))
        v = split_heads(self.to_v(x), self.n_heads)
        codes = self.codebook.nearest(k)
        if self.training and torch.is_grad_enabled():
            self.codebook.watch(k, codes, key_mask)
            k_hat = straight_through(k, codes, self.codebook.codes)
            o = attend(q, k_hat, v, scale=self.d_head**-0.5, mask=None if key_mask is None else key_mask[:, None, None, :])
        else:
            o = attend_to_codes(q, codes, v, self.codebook.codes, key_mask=key_mask)
        return self.to_out(merge_heads(o))
