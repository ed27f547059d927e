"""Performer: random features whose products have the exponential of softmax attention as their mean, so that linear attention estimates it.

x' = x √scale, scale = D_k^-1/2:   φ(q)ᵀφ(k) is, on average over W, exp(scale qᵀk), for
positive     φ(x) = exp(W x' - |x'|²/2) / √D_r                                D_φ = D_r
hyperbolic   φ(x) = [exp(W x' - |x'|²/2), exp(-W x' - |x'|²/2)] / √(2 D_r)    D_φ = 2 D_r, less variance
relu         φ(x) = max(W x', 0) + 1e-3, another kernel and no estimate       D_φ = D_r
then linear attention. W and φ: random_features.py.
Choromanski et al. 2020 (FAVOR+), arXiv:2009.14794, lemma 1 and sections 2.3 and 2.4. O(N D_φ (D_k + D_v)) time a head.

The estimate of exp is unbiased, that of the weights, a quotient, is not; and its variance is small for short q and k only.
"""

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, of_nothing, refuse_pairs
from models.attention.layers.mechanism import Examples, Row, cost_of_state
from models.attention.layers.multi_head import merge_heads
from models.attention.linear.linear import attend_features
from models.attention.linear.random_features import Kernel, RandomFeatures, log_features, relu_features
from models.parts.positions import Rotation


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
    """(B, H, N_q, D_k), (B, H, N_k, D_k), (B, H, N_k, D_v), W, bool (B, N_k) -> (B, H, N_q, D_v); 0 without any key.

    scale None: D_k^-1/2. eps is in the denominator only.
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
    """φ(q) / exp(m), φ(k) and m: (B, H, N_q, D_φ), (B, H, N_k, D_φ) -> the same shapes, in 0 .. 1, and (B, H, N_q, 1).

    c_d, the largest of column d over the keys, moves from the keys to the queries, exp(log_q + c) · exp(log_k - c), and of each query its
    largest exponent m is taken away. So φ(q)ᵀz >= 1 wherever there is a key, however long q and k are.
    """
    least = torch.finfo(log_k.dtype).min
    if key_mask is not None:
        log_k = torch.where(key_mask[:, None, :, None], log_k, least)
    c = log_k.amax(-2, keepdim=True).detach()  # (B, H, 1, D_φ)
    c = torch.where(c > least, c, 0.0)
    log_q = log_q + c
    m = log_q.amax(-1, keepdim=True).detach()
    return (log_q - m).exp(), (log_k - c).exp(), m


class PerformerAttention(RandomFeatures):
    """Multi-head self-attention by random features, with the projections of `SoftmaxAttention`, which it estimates."""

    capabilities = Capabilities(rotates=True, weights="sums")
    cost = cost_of_state("O(N m D)", lambda s: 2 * s.n_features, Row("Performer m", "O(1)", "O(1) parallel, O(N) step"))
    examples = Examples(large={"n_features": 256}, varied=("n_features", (64, 128, 256, 512)))

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
        refuse_pairs("the Performer", None, pair_mask, pair_bias)
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        return self.to_out(merge_heads(attend_performer(q, k, v, self.projection, key_mask=key_mask, kernel=self.kernel)))
