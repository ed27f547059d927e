"""Nyström attention: approximates the N x N matrix of softmax attention by the columns and rows of a few landmarks.

O = F A⁺ (R V) + conv(V),   F = softmax(q k̃ᵀ) (N, N_l),   A = softmax(q̃ k̃ᵀ) (N_l, N_l),   R = softmax(q̃ kᵀ) (N_l, N),   scale D_k^-1/2
A⁺ ≈ Z after 6 rounds of Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4;   conv: along the positions, with one kernel for each head
q̃, k̃: N_l landmarks of q and of k, see landmarks.py. Xiong et al. 2021 (Nyströmformer), arXiv:2102.03902, section 3.3. The rounds are part
of the mechanism, since they do not converge for an ill-conditioned A. O(N N_l D_k + N_l³) time a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities, of_nothing
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import ComplexityRow, Cost, Examples
from models.attention.layers.scaled_dot_product import masked_softmax
from models.attention.linear.landmarks import Landmarks, segment_means


def iterative_inverse(A: Tensor, n_iterations: int = 6) -> Tensor:
    """Approximate the pseudoinverse A⁺ of each matrix A (.., N_l, N_l): arXiv:2102.03902, section 3.2, eq. 11."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    norms = A.abs().sum(-2).amax(-1) * A.abs().sum(-1).amax(-1)
    Z = A.mT / (norms + (norms == 0))[..., None, None]
    for _ in range(n_iterations):
        AZ = A @ Z
        Z = Z @ (13 * identity - AZ @ (15 * identity - AZ @ (7 * identity - AZ))) / 4
    return Z


def landmark_values(q_landmarks: Landmarks, k: Tensor, v: Tensor, *, scale: float, key_mask: Tensor | None = None) -> Tensor:
    """Return R V (B, H, N_l, D_v): k (B, H, N_k, D_k), v (B, H, N_k, D_v), key_mask bool (B, N_k): True at tokens."""
    seen = q_landmarks.exist[:, None, :, None]  # (B, 1, N_l, 1)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    return masked_softmax(q_landmarks.means @ k.mT * scale, seen) @ v


def between_landmarks(
    q: Tensor, values: Tensor, q_landmarks: Landmarks, k_landmarks: Landmarks, *, scale: float, n_iterations: int | None = 6
) -> Tensor:
    """Return F A⁺ values, the outputs for all queries: q (B, H, N_q, D_k), values (B, H, N_l, D_v) -> (B, H, N_q, D_v).

    values: the outputs R V for the landmarks. n_iterations: of `iterative_inverse`; None: A⁺ is exact, by SVD.
    """
    keys, exist = k_landmarks.means.mT * scale, k_landmarks.exist[:, None, None, :]
    A = masked_softmax(q_landmarks.means @ keys, exist) * q_landmarks.exist[:, None, :, None]  # (B, H, N_l, N_l)
    inverse = torch.linalg.pinv(A) if n_iterations is None else iterative_inverse(A, n_iterations)
    return masked_softmax(q @ keys, exist) @ (inverse @ values)


def attend_nystrom(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    n_landmarks: int = 64,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    n_iterations: int | None = 6,
    landmarks: tuple[Landmarks, Landmarks] | None = None,
    short_by_softmax: bool = True,
    conv: Tensor | None = None,
) -> Tensor:
    """Compute Nyström attention: q (B, H, N_q, D_k), k (B, H, N_k, D_k), v (B, H, N_k, D_v) -> (B, H, N_q, D_v), or 0 if there is no key.

    query_mask bool (B, N_q), key_mask bool (B, N_k): True at tokens. `scale` defaults to D_k^-1/2. landmarks: those of q and of k; None:
    segment means. If a row has at most N_l queries, each is its own landmark and R V is exact softmax attention. R V is then the output,
    unless `short_by_softmax` is False or landmarks are given. conv: the convolution kernel (H, 1, K, 1), K odd; it requires N_q = N_k.
    """
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    exact = torch.promote_types(v.dtype, torch.float32)  # float32 at least: the rounds multiply many matrices
    dtype, scale = v.dtype, q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = q.to(exact), k.to(exact), v.to(exact)
    of_q, of_k = landmarks or (segment_means(q, n_landmarks, mask=query_mask), segment_means(k, n_landmarks, mask=key_mask))
    values = landmark_values(of_q, k, v, scale=scale, key_mask=key_mask)
    o = between_landmarks(q, values, of_q, of_k, scale=scale, n_iterations=n_iterations)
    if short_by_softmax and landmarks is None:
        is_query = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if query_mask is None else query_mask
        own = (is_query.cumsum(-1) - 1).clamp(min=0, max=n_landmarks - 1)  # (B, N_q), index of the landmark that is the query itself
        is_short = is_query.sum(-1) <= n_landmarks  # (B,)
        o = torch.where(is_short[:, None, None, None], values.gather(2, own[:, None, :, None].expand_as(o)), o)
    if conv is not None:
        tokens = v if key_mask is None else v * key_mask[:, None, :, None]
        o = o + F.conv2d(tokens, conv.to(exact), padding=(conv.shape[2] // 2, 0), groups=conv.shape[0])
    return o.to(dtype)


class NystromAttention(EqualHeadsEncoderLayer):
    """Multi-head Nyström self-attention, with a convolution unless conv_kernel is None. No causal form: landmarks include future tokens."""

    capabilities = Capabilities(rotates=True, ordered=True, averages=False, weights="sums")
    cost = Cost(
        "O(N m D + m³)",
        lambda N, s: 4 * N * s.n_landmarks * s.D + s.H * 6 * 4 * s.n_landmarks**3 + N * s.conv_kernel * s.D,
        ComplexityRow("Nyström m", "O(1)", "O(iterations)"),
    )
    examples = Examples(
        small={"n_landmarks": 4, "conv_kernel": 5},
        large={"n_landmarks": 64, "conv_kernel": 33},
        short={"n_landmarks": 8, "conv_kernel": None},
        varied=("n_landmarks", (16, 32, 64, 128)),
    )

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = True,
        n_landmarks: int = 64,
        conv_kernel: int | None = 33,
        n_iterations: int = 6,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        if n_landmarks < 1:
            raise ValueError(f"n_landmarks={n_landmarks} must be at least 1")
        if conv_kernel is not None and (conv_kernel < 1 or conv_kernel % 2 == 0):
            raise ValueError(f"conv_kernel={conv_kernel} must be odd, or None for no convolution")
        self.n_landmarks, self.n_iterations = n_landmarks, n_iterations
        self.conv = None
        if conv_kernel is not None:
            self.conv = nn.Conv2d(n_heads, n_heads, (conv_kernel, 1), padding=(conv_kernel // 2, 0), groups=n_heads, bias=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        conv = None if self.conv is None else self.conv.weight
        options: dict[str, Any] = {"n_landmarks": self.n_landmarks, "n_iterations": self.n_iterations, "conv": conv}
        return attend_nystrom(q, k, v, query_mask=key_mask, key_mask=key_mask, **options)
