"""Performer: linear attention with random features, whose products are unbiased estimates of the exponential in softmax attention.

x' = x √scale, scale = D_k^-1/2. For `positive` and `hyperbolic` the mean of φ(q)ᵀφ(k) over W is exp(scale qᵀk).
positive     φ(x) = exp(W x' - |x'|²/2) / √D_r                                D_φ = D_r
hyperbolic   φ(x) = [exp(W x' - |x'|²/2), exp(-W x' - |x'|²/2)] / √(2 D_r)    D_φ = 2 D_r, less variance
relu         φ(x) = max(W x', 0) + 1e-3, which does not estimate exp          D_φ = D_r
W and φ are computed in random_features.py.
Choromanski et al. 2020 (FAVOR+), arXiv:2009.14794, lemma 1 and sections 2.3 and 2.4. O(N D_φ (D_k + D_v)) time a head.

The attention weights are quotients of such estimates, and so are biased. The variance is small only for short q and k.
"""

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, of_nothing
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import ComplexityRow, Examples, cost_of_state
from models.attention.linear.linear import attend_features
from models.attention.linear.random_features import Kernel, RandomFeatures, log_features, relu_features


def attend_performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    key_mask: Tensor | None = None,
    kernel: Kernel = "positive",
    scale: float | None = None,
    eps: float = 1e-6,
    relu_eps: float = 1e-3,
) -> Tensor:
    """Compute the attention of the Performer: q (B, H, N_q, D_k), k (B, H, N_k, D_k), v (B, H, N_k, D_v) -> (B, H, N_q, D_v).

    The output is 0 if there is no key. projection: the random matrix W (D_r, D_k). key_mask bool (B, N_k): True at tokens. `scale`
    defaults to D_k^-1/2. eps: added to the denominator φ(q)ᵀz. relu_eps: added to the features of the kernel `relu`.
    """
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    if kernel == "relu":
        phi_q, phi_k = (relu_features(x, projection, scale=scale, relu_eps=relu_eps) for x in (q, k))
    else:
        log_q, log_k = (log_features(x, projection, kernel=kernel, scale=scale) for x in (q, k))
        phi_q, phi_k, _ = balanced_features(log_q, log_k, key_mask)
    return attend_features(phi_q, phi_k, v, key_mask=key_mask, eps=eps)


def balanced_features(log_q: Tensor, log_k: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return features of q and of k whose dot products are φ(q)ᵀφ(k) / exp(m), and m (B, H, N_q, 1). All features are between 0 and 1.

    log_q: log φ(q), (B, H, N_q, D_φ). log_k: log φ(k), (B, H, N_k, D_φ). The largest number c_d in each column d of log_k is subtracted
    from this column and added to column d of log_q. Then m, the largest number in each row of log_q, is subtracted. So for q and k of any
    length, the sum of a query's dot products with all keys is at least 1 if there is a key. key_mask bool (B, N_k): True at tokens.
    """
    least = torch.finfo(log_k.dtype).min
    if key_mask is not None:
        log_k = torch.where(key_mask[:, None, :, None], log_k, least)
    c = log_k.amax(-2, keepdim=True).detach()  # (B, H, 1, D_φ)
    c = torch.where(c > least, c, 0.0)
    log_q = log_q + c
    m = log_q.amax(-1, keepdim=True).detach()
    return (log_q - m).exp(), (log_k - c).exp(), m


class PerformerAttention(RandomFeatures, EqualHeadsEncoderLayer):
    """Multi-head self-attention by random features. With the projections of a `SoftmaxAttention`, it estimates the output of that layer."""

    capabilities = Capabilities(rotates=True, weights="sums")
    cost = cost_of_state("O(N m D)", lambda s: 2 * s.n_features, ComplexityRow("Performer m", "O(1)", "O(1) parallel, O(N) step"))
    examples = Examples(large={"n_features": 256}, varied=("n_features", (64, 128, 256, 512)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return attend_performer(q, k, v, self.projection, key_mask=key_mask, kernel=self.kernel)
