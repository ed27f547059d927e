"""Parallel forms of attention over whole texts, for training on a GPU: full attention, and a window with or without feature maps.

They compute what `CausalSoftmaxAttention`, `SinkWindowAttention` and `CausalHybridAttention` compute from the first token on, without a
state. A text is cut into blocks of L = W - g tokens, the recent ones that a token sees. The queries of block b see the first g keys, the
keys of blocks b - 1 and b by explicit scores, and all earlier keys by sums. Blocks are cut into parts of C tokens: query i of part u has
left the keys of all parts before u - L / C behind, and the first i + 1 keys of part u - L / C. So keys are moved by L tokens, and the rest
is linear attention in chunks. Nothing is larger than N (2 L + g) scores a head, and all blocks are computed at once.

Heads are float32, also under autocast: on a GPU their products are then TF32, with exact sums.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from models.attention.layers.causal import State
from models.attention.layers.causal_softmax import CausalSoftmaxAttention
from models.attention.layers.multi_head import merge_heads
from models.attention.linear.causal_hybrid import LEAST, CausalHybridAttention, query_features
from models.attention.sparse.sink_window import SinkWindowAttention
from models.decoder.model import Decoder
from models.parts.positions import Rotation, rotate

ALIGNED = 8  # bfloat16 numbers in 16 bytes: rows of whole multiples can use the tensor cores
UNSEEN = -1e4  # added to the scores of keys that a query does not see: their weights are exactly 0
PART_ALIGNED = 4  # float32 numbers in 16 bytes
LARGEST_PART = 96  # largest C


class FullAttention(nn.Module):
    """Softmax attention to all keys by torch's fused operator, with the projections of a layer. Under autocast in its dtype."""

    def __init__(self, layer: CausalSoftmaxAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: None, state: State, rotation: Rotation) -> tuple[Tensor, State]:
        """Return the outputs (B, N, D) of x (B, N, D). `state` is passed on."""
        q, k, v = self.layer.heads(x, rotation)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
        every = self.layer.for_every_head
        o = F.scaled_dot_product_attention(q.to(dtype), every(k.to(dtype)), every(v.to(dtype)), is_causal=True)
        return self.layer.to_out(merge_heads(o)), state


class WindowAttention(nn.Module):
    """Attention to a window and, if the layer has feature maps, to all earlier tokens, with the projections and maps of a layer.

    recompute: compute the attention again for its gradients, instead of keeping its scores. fused: the dtype of the near part, by torch's
    fused operator; None: by products of matrices, in that of the heads. compiled: compile the attention of layers
    with feature maps where gradients are wanted.
    """

    def __init__(
        self, layer: SinkWindowAttention, *, recompute: bool = False, fused: torch.dtype | None = None, compiled: bool = False
    ) -> None:
        super().__init__()
        self.layer, self.recompute, self.fused = layer, recompute, fused
        self.compiled = compiled and isinstance(layer, CausalHybridAttention)

    def forward(self, x: Tensor, mask: None, state: State, rotation: Rotation) -> tuple[Tensor, State]:
        """Return the outputs (B, N, D) of x (B, N, D). `state` is passed on."""
        q, k, v = self.layer.heads(x)
        compiled = self.compiled and torch.is_grad_enabled()
        of_layer = partial(compiled_attend() if compiled else attend, self.layer, dtype=self.fused)
        with torch.autocast(x.device.type, enabled=False):
            if self.recompute and torch.is_grad_enabled():
                o = checkpoint(of_layer, q, k, v, rotation, use_reentrant=False, preserve_rng_state=False)
            else:
                o = of_layer(q, k, v, rotation)
        return self.layer.to_out(merge_heads(o).to(x.dtype)), state


@cache
def compiled_attend() -> Callable[..., Tensor]:
    """Return `attend`, compiled by torch at its first call, which takes a minute or so. Layers of one shape share the result."""
    return torch.compile(attend, dynamic=False)


def in_parallel(decoder: Decoder, *, recompute: bool = False, fused: torch.dtype | None = None, compiled: bool = False) -> Decoder:
    """Replace the attention layers by their parallel forms, and the unembedding by nothing, in place. Return the decoder.

    It then returns the last hidden states (B, N, D), after the last norm. Raises ValueError for a layer that has no parallel form here.
    """
    for block in decoder.blocks:
        if isinstance(block.layer, SinkWindowAttention):
            block.layer = WindowAttention(block.layer, recompute=recompute, fused=fused, compiled=compiled)  # type: ignore[assignment]
        elif isinstance(block.layer, CausalSoftmaxAttention):
            block.layer = FullAttention(block.layer)  # type: ignore[assignment]
        else:
            raise ValueError(f"{type(block.layer).__name__} has no parallel form here; use a decoder with softmax attention")
    decoder.unembedding = nn.Identity()  # type: ignore[assignment]
    return decoder


def hidden_states(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return the last hidden states of a decoder of `in_parallel`: tokens (B, N) -> (B, N, D)."""
    return decoder(tokens, states=[{} for _ in decoder.blocks])[0]


def attend(layer: SinkWindowAttention, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, *, dtype: torch.dtype | None = None) -> Tensor:
    """Attend from the first token on: q (B, H, N, D_k), k, v (B, H_k, N, D_k), none of them rotated -> (B, H, N, D_k).

    dtype: compute near scores and values by torch's fused operator, in this dtype; None: as products of matrices, in that of q.

    One softmax has the first keys, the recent ones, and all far keys together as one key. Scores of first keys, whose queries are rotated
    otherwise, and that of the far key, the log of its weight, are given: they are columns of the query, and the key has a 1 there. They
    are given in two parts, since products in TF32 or bfloat16 have 8 to 11 bits. The far key's value is a 1 in one more column.
    """
    g, L, N = min(layer.n_first, q.shape[2]), layer.window - layer.n_first, q.shape[2]
    turned, kept, scale = rotate(q, rotation), rotate(k, rotation), layer.d_head**-0.5
    given = _first_scores(layer, q, turned, kept, rotation) * scale
    has_far = isinstance(layer, CausalHybridAttention) and layer.window < N
    if has_far:
        assert isinstance(layer, CausalHybridAttention)
        far, log_weight = _far(layer, q, kept, v, rotation)
        given = torch.cat([given, log_weight], dim=-1)  # (B, H, N, g + 1)
    seen = _seen(N, g, L, far=has_far, device=q.device)  # (n, L, K)
    exact = q.dtype if dtype is None else dtype
    queries, keys, values = _columns(turned, given, layer, kept * scale, v, K=seen.shape[-1], dtype=exact)
    bias = torch.zeros(seen.shape, dtype=exact, device=q.device).masked_fill_(~seen, UNSEEN)
    if dtype is None:
        o = (queries @ keys.mT).add_(bias).softmax(-1) @ values
    else:
        B, H, n = queries.shape[:3]
        queries, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (queries, keys, values))  # (B n, H, ..)
        bias = bias.repeat(B, 1, 1).unsqueeze(1).expand(-1, H, -1, -1)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            o = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=1.0)
        o = o.unflatten(0, (B, n)).transpose(1, 2).to(q.dtype)
    o = o.flatten(2, 3)[:, :, :N]
    near, share = o[..., : layer.d_head], o[..., layer.d_head : layer.d_head + 1]
    return torch.addcmul(near, share, far) if has_far else near


def _seen(N: int, g: int, L: int, *, far: bool, device: torch.device) -> Tensor:
    """Return which keys the queries of a block see, bool (n, L, K): the first ones, 2 L recent ones, with `far` all far keys together, and
    none up to a multiple of `ALIGNED`."""
    t = torch.arange(-(-N // L) * L, device=device).unflatten(0, (-1, L)).unsqueeze(-1)  # (n, L, 1)
    j = t[:, :1] - L + torch.arange(2 * L, device=device)  # (n, 1, 2 L), the positions of the recent keys
    columns = [torch.arange(g, device=device) <= t, (j >= g) & (j <= t) & (t - j < L)] + ([t - L >= g] if far else [])
    seen = torch.cat(columns, dim=-1)
    return F.pad(seen, (0, -seen.shape[-1] % ALIGNED))


def _columns(
    turned: Tensor, given: Tensor, layer: SinkWindowAttention, k: Tensor, v: Tensor, *, K: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B, H, n, L, D), keys (B, H, n, K, D) and values (B, H, n, K, D_v) of all blocks, with their further columns.

    turned (B, H, N, D_k); given (B, H, N, g) or (B, H, N, g + 1): the given scores; k, v (B, H_k, N, D_k). dtype: that of the results.
    """
    k, v = k.to(dtype), v.to(dtype)
    L, D_k, n_given = layer.window - layer.n_first, layer.d_head, given.shape[-1]
    g, width = min(layer.n_first, k.shape[2]), -(-(D_k + 2 * n_given) // ALIGNED) * ALIGNED
    coarse = given.detach().bfloat16().to(given.dtype)
    columns = [turned, coarse, given - coarse, given.new_zeros(1).expand(*given.shape[:-1], width - D_k - 2 * n_given)]
    queries = _blocks(torch.cat([column.to(dtype) for column in columns], dim=-1), L)
    recent_k, recent_v = _two_blocks(k, L), _two_blocks(v, L)  # (B, H_k, n, 2 L, D_k)
    ones = torch.zeros(K, width - D_k, dtype=k.dtype, device=k.device)
    at = torch.arange(n_given, device=k.device)
    rows = torch.where(at < g, at, 2 * L + at)  # of the first keys, and of the far key
    ones[rows, at] = 1.0
    ones[rows, n_given + at] = 1.0
    first_v = v[:, :, :g].unsqueeze(2).expand(-1, -1, recent_v.shape[2], -1, -1)
    rest = (0, 0, g, K - g - 2 * L)
    keys = torch.cat([F.pad(recent_k, rest), ones.expand(*recent_k.shape[:3], -1, -1)], dim=-1)
    is_far = torch.zeros(K, ALIGNED, dtype=v.dtype, device=v.device)
    is_far[g + 2 * L :, 0] = 1.0
    values = F.pad(torch.cat([first_v, recent_v], dim=3), (0, 0, 0, K - g - 2 * L))
    values = torch.cat([values, is_far.expand(*recent_v.shape[:3], -1, -1)], dim=-1)
    return queries, layer.for_every_head(keys), layer.for_every_head(values)


def _blocks(x: Tensor, L: int) -> Tensor:
    """Cut the tokens into blocks of L, with zeros after the last: (B, H, N, D_k) -> (B, H, n, L, D_k)."""
    short = -x.shape[2] % L
    return (F.pad(x, (0, 0, 0, short)) if short else x).unflatten(2, (-1, L))


def _two_blocks(x: Tensor, L: int) -> Tensor:
    """Return the keys or values of every block and of the block before it: (B, H_k, N, D_k) -> (B, H_k, n, 2 L, D_k)."""
    blocks = _blocks(x, L)
    return torch.cat([F.pad(blocks[:, :, :-1], (0, 0, 0, 0, 1, 0)), blocks], dim=3)


def _first_scores(layer: SinkWindowAttention, q: Tensor, turned: Tensor, kept: Tensor, rotation: Rotation) -> Tensor:
    """Return the scores (B, H, N, g) of the first keys. The queries from position W - 1 on are rotated as if they were there; instead, the
    keys are rotated back, which are fewer."""
    last, every = layer.window - 1, layer.for_every_head
    first = kept[:, :, : layer.n_first]
    scores = turned @ every(first).mT
    if q.shape[2] <= last:
        return scores
    back = Rotation(rotation.cos[..., last : last + 1, :], -rotation.sin[..., last : last + 1, :])
    is_early = torch.arange(q.shape[2], device=q.device).unsqueeze(-1) < last
    return torch.where(is_early, scores, q @ every(rotate(first, back)).mT)


def _far(layer: CausalHybridAttention, q: Tensor, kept: Tensor, v: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of the far values (B, H, N, D_k) and the log of their whole weight (B, H, N, 1), for N > W tokens.

    A query that has no far tokens has the mean 0 and the weight 1."""
    g, L, N, every = layer.n_first, layer.n_near, q.shape[2], layer.for_every_head
    phi_q, m = query_features(layer.phi_q(q))
    # A key that leaves the window at token j + L, with its value and a 1, in the place of that token.
    back = Rotation(rotation.cos[..., L:, :], -rotation.sin[..., L:, :])
    phi_k = layer.phi_k(rotate(kept[:, :, : N - L], back)).softmax(-1)
    phi_k = F.pad(phi_k[:, :, g:], (0, 0, L + g, 0))
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)[:, :, g : N - L]
    v = F.pad(v, (0, -v.shape[-1] % ALIGNED, L + g, 0))
    C = part_length(L)
    phi_q, phi_k, v = (_blocks(x, C) for x in (phi_q, phi_k, v))  # (B, H or H_k, N / C, C, ..)
    sums = phi_k.mT @ v  # (B, H_k, N / C, D_φ, D_k + 1)
    earlier = F.pad(sums[:, :, :-1], (0, 0, 0, 0, 1, 0)).cumsum(2)
    far = phi_q @ every(earlier) + (phi_q @ every(phi_k).mT).tril() @ every(v)
    far = far.flatten(2, 3)[:, :, :N]
    D_k = layer.d_head
    none = (torch.arange(N, device=q.device) < L + g).to(q.dtype).unsqueeze(-1)
    weight = far[..., D_k : D_k + 1] + (none + LEAST)
    return far[..., :D_k] / weight, weight.log() + m


def part_length(L: int) -> int:
    """Return C: the largest divisor of L up to `LARGEST_PART` that is a multiple of `PART_ALIGNED`, or L if it has none."""
    fitting = [C for C in range(PART_ALIGNED, min(L, LARGEST_PART) + 1, PART_ALIGNED) if L % C == 0]
    return fitting[-1] if fitting else L
