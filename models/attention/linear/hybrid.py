"""Hybrid attention: softmax weights for what is near, a feature map for all else, and one sum of weights for both.

near(i): i's block of C tokens, the one before it and the one after it; far(i): all other tokens.
o_i = (sum_{j near} exp(s_ij) v_j + g φ_q(q_i)ᵀ S_i) / (sum_{j near} exp(s_ij) + g φ_q(q_i)ᵀ z_i),   s_ij = q_iᵀ k_j / √D_k
S_i = sum_{j far} φ_k(k_j) v_jᵀ,   z_i = sum_{j far} φ_k(k_j),   the same for all of a block
Zhang et al. 2024 (LoLCATs), arXiv:2410.10254, there looking back only; φ as in learned_maps.py, g a number for each head.
O(N (3 C + D_φ) D_k) time a head. A text of up to 2 C tokens has nothing far: it gets softmax attention, to the bit of rounding, in two
blocks of half its length.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities, of_nothing, refuse_cross
from models.attention.layers.mechanism import Cost, Examples
from models.attention.layers.scaled_dot_product import scale_of
from models.attention.linear.learned_maps import Kind, LearnedMap
from models.attention.linear.linear import FeatureMap
from models.attention.linear.performer import balanced_features
from models.attention.sparse.blocks import in_blocks, keys_present, out_of_blocks
from models.attention.sparse.pattern import PatternAttention, at_least


def attend_hybrid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: FeatureMap,
    phi_k: FeatureMap,
    *,
    block: int = 64,
    scale: float | None = None,
    gain: Tensor | float = 1.0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """(B, H, N, D_k) twice, (B, H, N, D_v), bool (B, N) -> (B, H, N, D_v); 0 without any key.

    block: C; with 0, no token is near. gain: g, a number or (H, 1, 1, 1). Products of phi_q(q) and phi_k(k) must not be negative. In
    float32 at least.
    """
    refuse_cross("hybrid attention", q=q, k=k, v=v)
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    exact = torch.promote_types(v.dtype, torch.float32)
    dtype, q, k, v = v.dtype, q.to(exact), k.to(exact), v.to(exact)
    present = keys_present(k, key_mask)  # (B, 1, N, 1)
    counts = present.to(exact).expand(*v.shape[:3], 1)
    v = torch.cat([v * present, counts], dim=-1)  # (B, H, N, D_v + 1): the last column counts the weights
    if block == 0:
        features_q, features_k, _ = features_of(q, k, phi_q, phi_k, present)
        sums = features_q @ (features_k.mT @ v)  # (B, H, N, D_v + 1)
        return (sums[..., :-1] / torch.where(_is_any(sums), sums[..., -1:], 1.0)).to(dtype)
    C = torch.sym_min(block, (q.shape[2] + 1) // 2)  # all is near in two blocks: those of a short text are as short as can be
    q_blocks, k_blocks, v_blocks = (in_blocks(x, C) for x in (q, k, v))  # (B, H, n, C, ..): filled up before they are mapped
    present_blocks = in_blocks(present, C).flatten(2, 3)
    features = features_of(q_blocks.flatten(2, 3), k_blocks.flatten(2, 3), phi_q, phi_k, present_blocks)
    features_q, features_k, log_scale = (x.unflatten(2, (-1, C)) for x in features)
    sums = features_k.mT @ v_blocks  # (B, H, n, D_φ, D_v + 1): [S | z] of every block
    far = features_q @ beyond_neighbours(sums)  # (B, H, n, C, D_v + 1), divided by exp(log_scale)
    o = _near_and_far(q_blocks * scale_of(q, scale), k, v[..., :-1], present, far, log_scale, gain)
    return out_of_blocks(o, q.shape[2]).to(dtype)


def features_of(q: Tensor, k: Tensor, phi_q: FeatureMap, phi_k: FeatureMap, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """φ_q(q) / exp(m), φ_k(k) and m: (B, H, N, D_k) twice, bool (B, 1, N, 1) -> (B, H, N, D_φ) twice, (B, H, N, 1).

    Maps whose features are exponentials are balanced, so that no weight underflows; m is 0 for the others.
    """
    if isinstance(phi_q, LearnedMap) and phi_q.has_log and isinstance(phi_k, LearnedMap) and phi_k.has_log:
        return balanced_features(phi_q.log(q), phi_k.log(k, present))
    return phi_q(q), phi_k(k), torch.zeros_like(q[..., :1])


def _is_any(far: Tensor) -> Tensor:
    """Whether the weight in the last column is above the least normal number. Below it digits are lost, and 1 / weight overflows."""
    return far[..., -1:] > torch.finfo(far.dtype).tiny


def beyond_neighbours(x: Tensor) -> Tensor:
    """For each of n blocks, the sum over the blocks that are neither itself nor next to it: (B, H, n, D_φ, D_v) -> the same shape.

    Sums from the left and from the right: taking the near ones away from the sum of all would leave a remainder of rounding.
    """
    n = x.shape[2]
    at = torch.arange(n, device=x.device)
    x = F.pad(x, (0, 0, 0, 0, 0, 1))  # at n: nothing
    left = x.index_select(2, torch.where(at < 2, n, at - 2)).cumsum(2)  # at b: blocks 0 .. b - 2
    right = x.index_select(2, torch.where(at < 2, n, n + 1 - at)).cumsum(2)  # at b: blocks n - 1 down to n + 1 - b
    return left + right.index_select(2, n - 1 - at)


def _near_and_far(q: Tensor, k: Tensor, v: Tensor, present: Tensor, far: Tensor, log_scale: Tensor, gain: Tensor | float) -> Tensor:
    """All distant keys are one more key of the softmax, whose score is the logarithm of its weight: (B, H, n, C, D_v).

    It comes in by columns of the products, which cost little beside the (B, H, n, C, 3 C) weights. A query is [scale q, log weight of the
    far, 1]; a key is [k, 0, 0], or the least number at the end where it is absent; the far key is [0, 1, 0]. Near values have a 0 at the
    end and the far one a 1, so that what arrives there is the far key's share.
    """
    least, D_k, D_v = torch.finfo(q.dtype).min, k.shape[-1], v.shape[-1]
    rows = _rows_seen(q.shape[2], q.shape[3], k.shape[2])  # (n, 3 C + 1)
    is_any = _is_any(far)
    weight = torch.where(is_any, far[..., -1:], 1.0)
    log_weight = torch.where(is_any, (weight * gain).log() + log_scale, least)
    queries = torch.cat([q, log_weight, torch.ones_like(log_weight)], dim=-1)  # (B, H, n, C, D_k + 2)
    absent = ((1 - present.to(q.dtype)) * least).expand_as(k[..., :1])
    k = torch.cat([k, torch.zeros_like(absent), absent], dim=-1)
    keys = _spans(k, _one_at(D_k + 1, k) * least, _one_at(D_k, k), rows)
    v = F.pad(v, (0, 1))
    values = _spans(v, torch.zeros_like(v[0, 0, 0]), _one_at(D_v, v), rows)
    o = torch.softmax(queries @ keys.mT, dim=-1) @ values  # (B, H, n, C, D_v + 1)
    return o[..., :-1] + (o[..., -1:] / weight) * far[..., :-1]


def _rows_seen(n: int, C: int, N: int) -> Tensor:
    """What each block sees: three blocks of tokens, N where there is none, and N + 1 for all that is far. (n, 3 C + 1)."""
    near = torch.arange(n).unsqueeze(1) * C + torch.arange(-C, 2 * C)
    near = torch.where((near < 0) | (near >= N), N, near)
    return torch.cat([near, torch.zeros_like(near[:, :1]) + N + 1], dim=1)


def _spans(x: Tensor, absent: Tensor, far: Tensor, rows: Tensor) -> Tensor:
    """One gather, where slices of three blocks and their union would copy all of it twice: (B, H, N, D_k) -> (B, H, n, 3 C + 1, D_k)."""
    x = torch.cat([x, torch.stack([absent, far]).expand(*x.shape[:2], -1, -1)], dim=2)
    return x.index_select(2, rows.flatten().to(x.device)).unflatten(2, rows.shape)


def _one_at(place: int, x: Tensor) -> Tensor:
    """A row of x that has 1 there and 0 elsewhere."""
    return (torch.arange(x.shape[-1], device=x.device) == place).to(x.dtype)


class HybridAttention(PatternAttention):
    """Multi-head hybrid attention, with the projections of `SoftmaxAttention`, which it imitates: the maps and g are what it adds.

    block: C; with 0 it is linear attention with a trained map. feature_map: a kind of learned_maps.py. Raises ValueError for a negative
    block, and for a map that is not there.
    """

    capabilities = Capabilities(cross=False, pads_to="block", rotates=True, ordered=True, weights="sums")
    cost = Cost("O(N (3 C + m) D)", lambda N, s: 2 * N * (min(N, 3 * s.block) + 2 * s.D_k) * s.D)
    examples = Examples({"block": 4}, {"block": 64}, {"block": 4})

    def __init__(
        self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True, block: int = 64, feature_map: Kind = "positive"
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.block = at_least("block", block, 0, "with 0, no token is near")
        self.phi_q = LearnedMap(feature_map, n_heads, self.d_head)
        self.phi_k = LearnedMap(feature_map, n_heads, self.d_head)
        self.log_gain = nn.Parameter(torch.zeros(n_heads, 1, 1))  # log g

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        gain = self.log_gain.exp().unsqueeze(-1)  # (H, 1, 1, 1)
        return attend_hybrid(q, k, v, self.phi_q, self.phi_k, block=self.block, gain=gain, key_mask=key_mask)
