"""Hybrid attention: softmax weights for near tokens and a feature map for far tokens, normalised together.

near(i): i's block of C tokens, the block before it and the block after it; far(i): all other tokens.
o_i = (sum_{j near} exp(s_ij) v_j + g φ_q(q_i)ᵀ S_i) / (sum_{j near} exp(s_ij) + g φ_q(q_i)ᵀ z_i),   s_ij = q_iᵀ k_j / √D_k
S_i = sum_{j far} φ_k(k_j) v_jᵀ,   z_i = sum_{j far} φ_k(k_j),   equal for all tokens of a block
Zhang et al. 2024 (LoLCATs), arXiv:2410.10254; the paper's form is causal. φ_q and φ_k are maps of learned_maps.py, and g is one learned
number for each head. O(N (3 C + D_φ) D_k) time a head. A sequence of up to 2 C tokens has no far tokens. It is cut into two blocks of
half its length, and the result is softmax attention up to rounding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities, of_nothing, refuse_cross
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import Cost, Examples
from models.attention.layers.scaled_dot_product import scale_of
from models.attention.linear.learned_maps import Kind, LearnedMap
from models.attention.linear.linear import FeatureMap
from models.attention.sparse.blocks import in_blocks, keys_present, out_of_blocks
from models.parts.checks import at_least


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
    """Compute hybrid attention: q, k (B, H, N, D_k), v (B, H, N, D_v) -> (B, H, N, D_v), or 0 if there is no key.

    It computes in float32 at least. phi_q, phi_k: the feature maps, with phi_q(q)ᵀ phi_k(k) >= 0. block: C; with 0, no token is near.
    gain: g, a number or (H, 1, 1, 1). key_mask bool (B, N): True at tokens.
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
    # Tokens of two blocks see all tokens of both, so a short sequence is cut into two blocks.
    C = torch.sym_min(block, (q.shape[2] + 1) // 2)
    q_blocks, k_blocks, v_blocks = (in_blocks(x, C) for x in (q, k, v))  # (B, H, n, C, ..); padded before the maps are applied
    present_blocks = in_blocks(present, C).flatten(2, 3)
    features = features_of(q_blocks.flatten(2, 3), k_blocks.flatten(2, 3), phi_q, phi_k, present_blocks)
    features_q, features_k, log_scale = (x.unflatten(2, (-1, C)) for x in features)
    sums = features_k.mT @ v_blocks  # (B, H, n, D_φ, D_v + 1): [S | z] of every block
    far = features_q @ beyond_neighbours(sums)  # (B, H, n, C, D_v + 1), divided by exp(log_scale)
    o = _near_and_far(q_blocks * scale_of(q, scale), k, v[..., :-1], present, far, log_scale, gain)
    return out_of_blocks(o, q.shape[2]).to(dtype)


def features_of(q: Tensor, k: Tensor, phi_q: FeatureMap, phi_k: FeatureMap, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return φ_q(q) / exp(m) and φ_k(k), each (B, H, N, D_φ), and m (B, H, N, 1), 0 for maps that are no exponentials: q, k (B, H, N, D_k),
    present bool (B, 1, N, 1): True at tokens.
    """
    if isinstance(phi_q, LearnedMap) and phi_q.has_log and isinstance(phi_k, LearnedMap) and phi_k.has_log:
        return balanced_features(phi_q.log(q), phi_k.log(k, present))
    return phi_q(q), phi_k(k), torch.zeros_like(q[..., :1])


def balanced_features(log_q: Tensor, log_k: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return features of q and of k, between 0 and 1, whose dot products are φ(q)ᵀφ(k) / exp(m), and m (B, H, N_q, 1): log φ(q) (B, H, N_q,
    D_φ), log φ(k) (B, H, N_k, D_φ). Columns are balanced, so the sum of a query's dot products with all keys is at least 1 if there is a
    key.
    """
    least = torch.finfo(log_k.dtype).min
    if key_mask is not None:
        log_k = torch.where(key_mask[:, None, :, None], log_k, least)
    c = log_k.amax(-2, keepdim=True).detach()  # (B, H, 1, D_φ)
    c = torch.where(c > least, c, 0.0)
    log_q = log_q + c
    m = log_q.amax(-1, keepdim=True).detach()
    return (log_q - m).exp(), (log_k - c).exp(), m


def _is_any(far: Tensor) -> Tensor:
    """Return for each query whether its weight of all far keys, in the last column, has a finite reciprocal."""
    return far[..., -1:] > torch.finfo(far.dtype).tiny


def beyond_neighbours(x: Tensor) -> Tensor:
    """For each of n blocks, sum x over all blocks but this block and its two neighbours: (B, H, n, D_φ, D_v) -> the same shape. The total
    minus the near blocks would leave a rounding error.
    """
    n = x.shape[2]
    at = torch.arange(n, device=x.device)
    x = F.pad(x, (0, 0, 0, 0, 0, 1))  # appends an empty block at index n
    left = x.index_select(2, torch.where(at < 2, n, at - 2)).cumsum(2)  # index b: sum of blocks 0 .. b - 2
    right = x.index_select(2, torch.where(at < 2, n, n + 1 - at)).cumsum(2)  # index b: sum of blocks n + 1 - b .. n - 1
    return left + right.index_select(2, n - 1 - at)


def _near_and_far(q: Tensor, k: Tensor, v: Tensor, present: Tensor, far: Tensor, log_scale: Tensor, gain: Tensor | float) -> Tensor:
    """Return (B, H, n, C, D_v): softmax attention in which all far keys together count as one key, whose score is the log of their weight.

    q (B, H, n, C, D_k), scaled; k, v (B, H, N, ..); far (B, H, n, C, D_v + 1): the weighted sum of the far values and, in the last column,
    of their weights, both divided by exp(log_scale). A query is [scale q, log of the far weight, 1]; a near key is [k, 0, 0 or, if it is
    absent, the lowest number]; the far key is [0, 1, 0]. The last output column is the far key's share of the weights.
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
    """Return the indices (n, 3 C + 1) of the keys that each of n blocks of C tokens sees: N for a token that does not exist, N + 1 for the
    far key.
    """
    near = torch.arange(n).unsqueeze(1) * C + torch.arange(-C, 2 * C)
    near = torch.where((near < 0) | (near >= N), N, near)
    return torch.cat([near, torch.zeros_like(near[:, :1]) + N + 1], dim=1)


def _spans(x: Tensor, absent: Tensor, far: Tensor, rows: Tensor) -> Tensor:
    """Return the rows that each block sees, three blocks of x and the row `far`, with `absent` outside x: (B, H, N, D_k) -> (B, H, n, 3 C +
    1, D_k).
    """
    x = torch.cat([x, torch.stack([absent, far]).expand(*x.shape[:2], -1, -1)], dim=2)
    return x.index_select(2, rows.flatten().to(x.device)).unflatten(2, rows.shape)


def _one_at(place: int, x: Tensor) -> Tensor:
    """Return a row like those of x, with 1 at index `place` and 0 elsewhere."""
    return (torch.arange(x.shape[-1], device=x.device) == place).to(x.dtype)


class HybridAttention(EqualHeadsEncoderLayer):
    """Multi-head hybrid attention. It adds feature maps and g to the projections of `SoftmaxAttention`, which it can imitate.

    block: C; with 0 it is linear attention with a trained map. feature_map: a kind of map in learned_maps.py. Raises ValueError if
    `block` is negative or the map is unknown.
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
