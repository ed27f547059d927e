"""Parallel forms of attention over whole texts, for training on a GPU: full attention, and a window with or without feature maps.

They compute what `CausalSoftmaxAttention`, `SinkWindowAttention` and `CausalHybridAttention` compute from the first token on, without a
state. A text is cut into blocks of L = W - g tokens, the recent ones that a token sees. The queries of block b see the first g keys, the
keys of blocks b - 1 and b by explicit scores, and all earlier keys by sums. Blocks are cut into parts of C tokens: query i of part u has
left the keys of all parts before u - L / C behind, and the first i + 1 keys of part u - L / C. So keys are moved by L tokens, and the rest
is linear attention in chunks. Nothing is larger than N (2 L + g) scores a head, and all blocks are computed at once.

Heads are float32, also under autocast: on a GPU their products are then TF32, with exact sums.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.attention.layers.causal import State
from models.attention.layers.causal_softmax import CausalSoftmaxAttention
from models.attention.layers.multi_head import merge_heads
from models.attention.linear.causal_hybrid import LEAST, CausalHybridAttention, query_features
from models.attention.sparse.sink_window import SinkWindowAttention
from models.decoder.model import Decoder
from models.parts.positions import Rotation, rotate

ALIGNED = 4  # float32 numbers in 16 bytes: rows of whole multiples can use the tensor cores
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

    recompute: compute the attention again for its gradients, instead of keeping its scores.
    """

    def __init__(self, layer: SinkWindowAttention, *, recompute: bool = False) -> None:
        super().__init__()
        self.layer, self.recompute = layer, recompute

    def forward(self, x: Tensor, mask: None, state: State, rotation: Rotation) -> tuple[Tensor, State]:
        """Return the outputs (B, N, D) of x (B, N, D). `state` is passed on."""
        q, k, v = self.layer.heads(x)
        with torch.autocast(x.device.type, enabled=False):
            if self.recompute and torch.is_grad_enabled():
                o = checkpoint(attend, self.layer, q, k, v, rotation, use_reentrant=False, preserve_rng_state=False)
            else:
                o = attend(self.layer, q, k, v, rotation)
        return self.layer.to_out(merge_heads(o).to(x.dtype)), state


def in_parallel(decoder: Decoder, *, recompute: bool = False) -> Decoder:
    """Replace the attention layers by their parallel forms, and the unembedding by nothing, in place. Return the decoder.

    It then returns the last hidden states (B, N, D), after the last norm. Raises ValueError for a layer that has no parallel form here.
    """
    for block in decoder.blocks:
        if isinstance(block.layer, SinkWindowAttention):
            block.layer = WindowAttention(block.layer, recompute=recompute)  # type: ignore[assignment]
        elif isinstance(block.layer, CausalSoftmaxAttention):
            block.layer = FullAttention(block.layer)  # type: ignore[assignment]
        else:
            raise ValueError(f"{type(block.layer).__name__} has no parallel form here; use a decoder with softmax attention")
    decoder.unembedding = nn.Identity()  # type: ignore[assignment]
    return decoder


def hidden_states(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return the last hidden states of a decoder of `in_parallel`: tokens (B, N) -> (B, N, D)."""
    return decoder(tokens, states=[{} for _ in decoder.blocks])[0]


def attend(layer: SinkWindowAttention, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
    """Attend from the first token on: q (B, H, N, D_k), k, v (B, H_k, N, D_k), none of them rotated -> (B, H, N, D_k)."""
    g, L, N = layer.n_first, layer.window - layer.n_first, q.shape[2]
    n = -(-N // L)
    turned, kept = rotate(q, rotation), rotate(k, rotation)
    has_far = isinstance(layer, CausalHybridAttention) and layer.window < N
    seen = _seen(N, g, L, far=has_far, like=q)  # (n, L, K)
    scale = layer.d_head**-0.5
    recent = _blocks(turned * scale, L) @ _two_blocks(kept, L, layer).mT  # (B, H, n, L, 2 L)
    parts = [recent, _blocks(_first_scores(layer, q, turned, kept, rotation) * scale, L)]
    if has_far:
        assert isinstance(layer, CausalHybridAttention)
        far, log_weight = (_blocks(x, L) for x in _far(layer, q, kept, v, rotation))  # (B, H, n, L, D_k), (.., 1)
        parts.append(log_weight)
    parts.append(recent.new_zeros(1).expand(*recent.shape[:-1], seen.shape[-1] - sum(part.shape[-1] for part in parts)))
    p = torch.cat(parts, dim=-1).add_(seen).softmax(-1)
    first = layer.for_every_head(v[:, :, :g]).unsqueeze(2).expand(-1, -1, n, -1, -1)
    values = torch.cat([_two_blocks(v, L, layer), first], dim=3)  # (B, H, n, 2 L + g, D_k)
    K = values.shape[3]
    o = p[..., :K] @ values
    if has_far:
        o = o + p[..., K : K + 1] * far
    return o.flatten(2, 3)[:, :, :N]


def _seen(N: int, g: int, L: int, *, far: bool, like: Tensor) -> Tensor:
    """Return 0 for keys that the queries of a block see and -inf for others, (n, L, K): 2 L recent keys, the first ones, with `far` all far
    keys together, and columns that no query sees up to a multiple of `ALIGNED`."""
    device = like.device
    t = torch.arange(-(-N // L) * L, device=device).unflatten(0, (-1, L)).unsqueeze(-1)  # (n, L, 1)
    j = t[:, :1] - L + torch.arange(2 * L, device=device)  # (n, 1, 2 L), the positions of the recent keys
    columns = [(j >= g) & (j <= t) & (t - j < L), torch.arange(min(g, N), device=device) <= t]
    columns += [t - L >= g] if far else []
    seen = torch.cat(columns, dim=-1)
    seen = F.pad(seen, (0, -seen.shape[-1] % ALIGNED))
    return torch.zeros(seen.shape, dtype=like.dtype, device=device).masked_fill_(~seen, -torch.inf)


def _blocks(x: Tensor, L: int) -> Tensor:
    """Cut the tokens into blocks of L, with zeros after the last: (B, H, N, D_k) -> (B, H, n, L, D_k)."""
    short = -x.shape[2] % L
    return (F.pad(x, (0, 0, 0, short)) if short else x).unflatten(2, (-1, L))


def _two_blocks(x: Tensor, L: int, layer: SinkWindowAttention) -> Tensor:
    """Return the keys or values of every block and of the block before it, for every head: (B, H_k, N, D_k) -> (B, H, n, 2 L, D_k)."""
    blocks = _blocks(x, L)
    return layer.for_every_head(torch.cat([F.pad(blocks[:, :, :-1], (0, 0, 0, 0, 1, 0)), blocks], dim=3))


def _first_scores(layer: SinkWindowAttention, q: Tensor, turned: Tensor, kept: Tensor, rotation: Rotation) -> Tensor:
    """Return the scores (B, H, N, g) of the first keys. The queries from position W - 1 on are rotated as if they were there; instead, the
    keys are rotated back, which are fewer."""
    last, every = layer.window - 1, layer.for_every_head
    first = kept[:, :, : layer.n_first]
    scores = turned @ every(first).mT
    if q.shape[2] <= last:
        return scores
    back = Rotation(rotation.cos[..., last : last + 1, :], -rotation.sin[..., last : last + 1, :])
    return torch.cat([scores[:, :, :last], q[:, :, last:] @ every(rotate(first, back)).mT], dim=2)


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
    """Return C: the largest divisor of L up to `LARGEST_PART` that is a multiple of `ALIGNED`, or L if it has none."""
    return max((C for C in range(ALIGNED, min(L, LARGEST_PART) + 1, ALIGNED) if L % C == 0), default=L)
