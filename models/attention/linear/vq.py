"""Transformer-VQ: each key is replaced by the nearest of Z codes. Softmax attention to the replaced keys is then exact at linear cost.

k^_j = c_{z_j},   z_j = argmin_s ||k_j - c_s||²,   o_i = softmax_j(scale q_i . k^_j) V = sum_s e_is U_s / sum_s e_is L_s
e_is = exp(scale q_i . c_s),   U_s = sum of the values with code s,   L_s = number of these values,   scale = D_k^-1/2
Lingle 2023, arXiv:2309.16354, section 3. q and k are layer-normalised as in the paper. The paper's gates are left out, and its position
bias is a separate function, in vq_near.py. O(N Z D_k) time a head for Z codes, and no N x N matrix. The codebook is not trained by
gradients: its codes are moving means of keys (codebook.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import ComplexityRow, Examples, cost_of_state
from models.attention.layers.multi_head import both_masks
from models.attention.layers.scaled_dot_product import attend
from models.attention.linear.codebook import Codebook, straight_through


def attend_to_codes(
    q: Tensor, codes: Tensor, v: Tensor, codebook: Tensor, *, scale: float | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """Attend from q to the codes of the keys. Returns (B, H, N_q, D_v), 0 if there is no key.

    q (B, H, N_q, D_k), codes int64 (B, H, N_k): index of each key's code, v (B, H, N_k, D_v), codebook (H, Z, D_k), key_mask bool
    (B, N_k): True at tokens. `scale` defaults to D_k^-1/2.
    """
    exact = torch.promote_types(v.dtype, torch.float32)  # float32 at least: a half-precision sum over N would stop growing
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    one_hot = F.one_hot(codes, codebook.shape[-2]).to(exact)  # (B, H, N_k, Z)
    if key_mask is not None:
        one_hot = one_hot * key_mask[:, None, :, None]
    U = one_hot.mT @ v.to(exact)  # (B, H, Z, D_v)
    L = one_hot.sum(-2)  # (B, H, Z)
    e = weights_of_codes((q @ codebook.mT).to(exact) * scale, L.unsqueeze(-2))  # (B, H, N_q, Z)
    return mean_of_codes(e @ U, e @ L.unsqueeze(-1)).to(v.dtype)


def weights_of_codes(scores: Tensor, L: Tensor) -> Tensor:
    """Return exp(scores - the largest score of a code in use), or 0 for a code that is not in use: scores (.., N_q, Z) -> (.., N_q, Z).

    L (.., N_q or 1, Z): the number of keys with each code, 0 for a code that is not in use. Such codes are left out of the largest
    score, because otherwise the weights of all codes in use might underflow.
    """
    scores = torch.where(L > 0, scores, torch.finfo(scores.dtype).min)
    return torch.exp(scores - scores.amax(-1, keepdim=True)) * (L > 0)


def mean_of_codes(weighted: Tensor, total: Tensor) -> Tensor:
    """Return the outputs (.., D_v), weighted / total, or 0 if there is no key.

    weighted: the weighted sum of the values (.., D_v). total: the sum of the weights (.., 1), which is 0 without any key, else at least 1.
    """
    return weighted / (total + (total == 0))


class VectorQuantisedAttention(EqualHeadsEncoderLayer):
    """Multi-head attention to quantised keys, with the projections of `SoftmaxAttention` and a codebook of n_codes codes a head.

    In training with gradients it computes the scores of all token pairs, in O(N²), with the same outputs. So each key gets a gradient of
    its own, which is that of its replacement (straight-through). A training loop must also call `commitment_loss` and `update_codebooks`
    of codebook.py.
    """

    capabilities = Capabilities(straight_through=True, weights="sums")
    cost = cost_of_state("O(N S D)", lambda s: 2 * s.n_codes, ComplexityRow("VQ S", "O(1)", "O(1) parallel, O(N) step"))
    examples = Examples({"n_codes": 7}, {"n_codes": 512}, {"n_codes": 16}, ("n_codes", (64, 128, 256, 512)))

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True, n_codes: int = 512) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.codebook = Codebook(n_heads, n_codes, self.d_head)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        q, k = (F.layer_norm(x, (self.d_head,)) for x in (q, k))
        codes = self.codebook.nearest(k)
        if self.training and torch.is_grad_enabled():
            self.codebook.watch(k, codes, key_mask)
            k_hat = straight_through(k, codes, self.codebook.codes)
            return attend(q, k_hat, v, mask=both_masks(key_mask, None))
        return attend_to_codes(q, codes, v, self.codebook.codes, key_mask=key_mask)
