"""Causal Performer: linear attention with the random features of random_features.py, whose exponents may be arbitrarily large.

S_t = S_{t-1} + φ(k_t) v_tᵀ,   z_t = z_{t-1} + φ(k_t),   o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + eps)
Choromanski et al. 2020 (FAVOR+), arXiv:2009.14794, section 2.2. φ(k) is divided by exp(m_t), where m_t is the head's largest exponent so
far; when it rises, S and z decay (running_max.py). O(N (C + D_φ) D_v) time a head, in chunks of C tokens.
"""

from typing import NamedTuple

from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_cross
from models.attention.layers.causal import EqualHeadsLayer, State, attend_causal_features, no_past
from models.attention.layers.mechanism import Examples, cost_of_state
from models.attention.layers.multi_head import merge_heads
from models.attention.layers.recurrence import Execution, chunkwise
from models.attention.layers.running_max import of_tokens, running_max
from models.attention.linear.random_features import Kernel, RandomFeatures, log_features, project, relu_features
from models.parts.positions import Rotation

EPS = 1e-20  # avoids 0 / 0; far below φ(q)ᵀz, which is tiny itself if the features that are large in q are small in all keys


class FeatureSums(NamedTuple):
    """The state of the causal Performer. It is zeros before the first token."""

    S: Tensor  # [S | z], (B, H, D_φ, D_v + 1), divided by exp(m)
    m: Tensor  # (B, H, 1), the largest exponent so far; 0 for the kernel `relu`


def attend_causal_performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    past: FeatureSums | None = None,
    *,
    mask: Tensor | None = None,
    kernel: Kernel = "positive",
    scale: float | None = None,
    eps: float = EPS,
    relu_eps: float = 1e-3,
    recurrence: Execution = chunkwise,
) -> tuple[Tensor, FeatureSums]:
    """Return the outputs o (B, H, N, D_v) and the new state: q, k (B, H, N, D_k), v (B, H, N, D_v), projection: the random matrix W (D_r,
    D_k). mask bool (B, N): True at tokens, at the left. eps: added to φ(q)ᵀz. relu_eps: added to the features of the kernel `relu`.
    """
    refuse_cross("the causal Performer", q=q, k=k, v=v)
    if past is None:
        n_features = projection.shape[-2] * (2 if kernel == "hyperbolic" else 1)
        past = FeatureSums(no_past(v, n_features, v.shape[-1] + 1), no_past(v, 1))
    if kernel == "relu":
        phi_q, phi_k = (relu_features(x, projection, scale=scale, relu_eps=relu_eps) for x in (q, k))
        decay, m_last = None, past.m
    else:
        log_q = project(q, projection, kernel=kernel, scale=scale)  # without what all features have in common, which cancels below
        log_k = of_tokens(log_features(k, projection, kernel=kernel, scale=scale), mask)
        seen = past.S[..., -1].amax(-1, keepdim=True) > 0  # (B, H, 1): after a token, the largest number in z is at least 1
        m, decay, m_last = running_max(log_k.amax(-1, keepdim=True), past.m, seen)
        decay = decay.squeeze(-1)  # (B, H, N)
        phi_q, phi_k = (log_q - log_q.amax(-1, keepdim=True).detach()).exp(), (log_k - m).exp()
    o, S = attend_causal_features(phi_q, phi_k, v, past.S, mask=mask, decay=decay, eps=eps, recurrence=recurrence)
    return o, FeatureSums(S, m_last)


class CausalPerformerAttention(RandomFeatures, EqualHeadsLayer):
    """Multi-head causal attention by random features. Its state is [S | z] (H, D_φ, D_v + 1) and m (H, 1), invalid after W is redrawn."""

    capabilities = Capabilities.of_recurrence(rotates=True)
    cost = cost_of_state("O(N m D)", lambda s: 2 * s.n_features)
    examples = Examples(large={"n_features": 256})
    settles = ("m",)
    holds = (("S", "sums_in_last_column"),)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        n_features = len(self.projection) * (2 if self.kernel == "hyperbolic" else 1)
        return {"S": (self.n_heads, n_features, self.d_head + 1), "m": (self.n_heads, 1)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        o, past = attend_causal_performer(
            q, k, v, self.projection, FeatureSums(**state), mask=mask, kernel=self.kernel, recurrence=self.recurrence
        )
        return self.to_out(merge_heads(o).to(x.dtype)), past._asdict()
