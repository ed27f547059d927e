"""Performer: linear attention with random features, whose products are unbiased estimates of the exponential in softmax attention.

x' = x √scale, scale = D_k^-1/2. For `positive` and `hyperbolic` the mean of φ(q)ᵀφ(k) over W is exp(scale qᵀk).
positive     φ(x) = exp(W x' - |x'|²/2) / √D_r                                D_φ = D_r
hyperbolic   φ(x) = [exp(W x' - |x'|²/2), exp(-W x' - |x'|²/2)] / √(2 D_r)    D_φ = 2 D_r, less variance
relu         φ(x) = max(W x', 0) + 1e-3, which does not estimate exp          D_φ = D_r
So that no exponential overflows, the output is computed as two softmaxes, over tokens and over features:
S_d / z_d = Σ_j softmax_j(log φ_d(k_j)) v_j,   o = Σ_d softmax_d(log φ_d(q) + log z_d) S_d / z_d
Choromanski et al. 2020 (FAVOR+), arXiv:2009.14794, lemma 1 and sections 2.3 and 2.4. O(N D_φ (D_k + D_v)) time a head.
"""

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, of_nothing
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import ComplexityRow, Examples, cost_of_state
from models.attention.linear.linear import attend_features
from models.attention.linear.random_features import Kernel, RandomFeatures, half_square, project, relu_features


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
    defaults to D_k^-1/2. eps and relu_eps are of the kernel `relu`: eps is added to the denominator φ(q)ᵀz, relu_eps to the features.
    """
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    if kernel == "relu":
        phi_q, phi_k = (relu_features(x, projection, scale=scale, relu_eps=relu_eps) for x in (q, k))
        return attend_features(phi_q, phi_k, v, key_mask=key_mask, eps=eps)
    log_k = _log_features_of_keys(k, projection, key_mask, kernel=kernel, scale=scale)  # (B, H, D_φ, N_k)
    shares = torch.softmax(log_k, dim=-1)
    log_sums = log_k.amax(-1) - shares.amax(-1).log()  # (B, H, D_φ), log z: the largest share is exp(largest) / z
    values = v.to(log_k.dtype)
    means = shares @ (values if key_mask is None else values * key_mask[:, None, :, None])  # (B, H, D_φ, D_v), S / z
    weights = torch.softmax(project(q, projection, kernel=kernel, scale=scale) + log_sums.unsqueeze(-2), dim=-1)  # (B, H, N_q, D_φ)
    return (weights.to(log_k.dtype) @ means).to(v.dtype)


def _log_features_of_keys(k: Tensor, projection: Tensor, key_mask: Tensor | None, *, kernel: Kernel, scale: float | None) -> Tensor:
    """Return log φ(k) without its constant, with tokens last: k (B, H, N_k, D_k) -> (B, H, D_φ, N_k), the lowest or -inf at padding."""
    projected = project(k, projection, kernel=kernel, scale=scale, tokens_last=True)
    exponent = -half_square(k, scale).mT  # (B, H, 1, N_k)
    if key_mask is not None:
        exponent = torch.where(key_mask[:, None, None, :], exponent, torch.finfo(exponent.dtype).min)
    return projected + exponent


class PerformerAttention(RandomFeatures, EqualHeadsEncoderLayer):
    """Multi-head self-attention by random features. With the projections of a `SoftmaxAttention`, it estimates the output of that layer."""

    capabilities = Capabilities(rotates=True, weights="sums")
    cost = cost_of_state("O(N m D)", lambda s: 2 * s.n_features, ComplexityRow("Performer m", "O(1)", "O(1) parallel, O(N) step"))
    examples = Examples(large={"n_features": 256}, varied=("n_features", (64, 128, 256, 512)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return attend_performer(q, k, v, self.projection, key_mask=key_mask, kernel=self.kernel)
