"""Longformer: every token sees a window around it, and a few global tokens see all tokens and are seen by all.

local token i    softmax over |i - j| <= w / 2 and the global tokens G, with q, k, v; a global token inside the window counts once
global token i   softmax over all j, with separate projections q_g, k_g, v_g
Beltagy et al. 2020, arXiv:2004.05150, sections 3.1 and 3.2. O(N (w + C + |G|) D_k) time, in blocks of C tokens. A window dilated by d
sees every d-th token up to a distance of d w / 2. It is computed as an undilated window over the tokens of each residue class mod d. The
causal form is in causal_longformer.py.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities, of_nothing, refuse_cross
from models.attention.layers.encoder import EncoderLayer
from models.attention.layers.mechanism import Cost, Examples
from models.attention.layers.multi_head import EqualHeads, heads_of, merge_heads
from models.attention.layers.scaled_dot_product import attend, masked_softmax, scale_of
from models.attention.sparse.blocks import in_blocks, keys_present, near, out_of_blocks, spans
from models.parts.checks import at_least
from models.parts.positions import Rotation

Heads = tuple[Tensor, Tensor, Tensor]  # q, k: (B, H, N, D_k), v: (B, H, N, D_v)


def attend_longformer(
    local: Heads,
    of_globals: Heads,
    *,
    window: int,
    n_global: int = 0,
    global_mask: Tensor | None = None,
    dilation: int | Sequence[int] = 1,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    block: int = 64,
) -> Tensor:
    """Compute Longformer attention. Returns the outputs of all tokens, (B, H, N, D_v), 0 at padding.

    local: (q, k, v). of_globals: (q_g, k_g, v_g), from the projections for global tokens. key_mask bool (B, N): True at tokens. window: w,
    even. The global tokens are those of global_mask bool (B, N), if given, or else the first n_global. dilation: a number for all heads, or
    one for each. block: C; it affects the speed only.
    """
    q, k, v = local
    q_g, k_g, v_g = of_globals
    refuse_cross("the Longformer", q=q, k=k, v=v, q_g=q_g, k_g=k_g, v_g=v_g)
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    present = keys_present(k, key_mask)  # (B, 1, N, 1)
    is_global, take = _first(n_global, q) if global_mask is None else _anywhere(global_mask)
    scale = scale_of(q, scale)
    k_G, v_G, sees_G = take(k), take(v), take(present & is_global).mT  # (B, H, G, ..), (B, 1, 1, G)
    rows = [
        _windows(
            [x[:, heads] for x in (q, k, v, k_G, v_G)], present & ~is_global, sees_G, radius=window // 2, dilation=d, scale=scale, C=block
        )
        for heads, d in _by_dilation(dilation, q.shape[1])
    ]
    global_rows = attend(take(q_g), k_g, v_g, scale=scale, mask=present.mT)  # (B, H, G, D_v)
    number = (is_global.cumsum(2) - 1).clamp_min(0)  # index among the global tokens, (B, 1, N, 1)
    global_rows = global_rows.gather(2, number.expand(*v.shape))
    return torch.where(is_global, global_rows, torch.cat(rows, dim=1)) * present


def _windows(tensors: Sequence[Tensor], in_windows: Tensor, sees_G: Tensor, *, radius: int, dilation: int, scale: float, C: int) -> Tensor:
    """Compute the outputs of local tokens, (B, H, N, D_v), for heads with the same dilation d. tensors: q, k, v, k_G, v_G.

    in_windows: bool (B, 1, N, 1), True at tokens that are not global. sees_G: bool (B, 1, 1, G), which of the global tokens k_G exist.
    Each residue class mod d becomes a row of the batch, so B becomes B d and N becomes N / d.
    """
    q, k, v, k_G, v_G = tensors
    N = q.shape[2]
    q, k, v, in_windows = (_classes(x, dilation) for x in (q, k, v, in_windows))
    k_G, v_G, sees_G = (x.repeat_interleave(dilation, dim=0).unsqueeze(2) for x in (k_G, v_G, sees_G))  # (B, H, 1, G, ..)
    before, C = -(-radius // C), torch.sym_min(C, q.shape[2])  # a short sequence is not padded to a full block
    reach = {"before": before, "after": before}
    q_blocks = in_blocks(q, C, spare=1) * scale  # (B, H, n, C, D_k)
    n = q_blocks.shape[2]
    near_k, near_v, near_in = (spans(x, n, C, **reach) for x in (k, v, in_windows))  # (B, H, n, span, ..)
    seen = near(C, **reach, window=radius, causal=False).to(q.device) & near_in.mT  # (B, 1, n, C, span)
    p = masked_softmax(
        torch.cat([q_blocks @ near_k.mT, q_blocks @ k_G.mT], dim=-1), torch.cat([seen, sees_G.expand(-1, -1, n, C, -1)], dim=-1)
    )
    span = near_k.shape[3]
    o = out_of_blocks(p[..., :span] @ near_v + p[..., span:] @ v_G, q.shape[2])
    return o.unflatten(0, (-1, dilation)).permute(0, 2, 3, 1, 4).flatten(2, 3)[:, :, :N]


def _classes(x: Tensor, dilation: int) -> Tensor:
    """Make each residue class mod d = dilation a row of the batch: (B, H, N, D_k) -> (B d, H, N / d, D_k)."""
    return in_blocks(x, dilation, spare=int(dilation > 1)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _by_dilation(dilation: int | Sequence[int], n_heads: int) -> Iterator[tuple[slice, int]]:
    """Yield each run of adjacent heads with the same dilation, and this dilation."""
    dilations = [dilation] * n_heads if isinstance(dilation, int) else list(dilation)
    assert len(dilations) == n_heads, "one dilation for each head"
    begin = 0
    for end in range(1, n_heads + 1):
        if end == n_heads or dilations[end] != dilations[begin]:
            yield slice(begin, end), dilations[begin]
            begin = end


def _first(n_global: int, q: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return which tokens are global, bool (1, 1, N, 1), and a function that takes the first n_global tokens of x (B, H, N, D_k), at least
    one and with zeros after the last: an export fails for an axis of size 0.
    """
    room = max(n_global, 1)
    is_global = torch.arange(q.shape[2], device=q.device)[None, None, :, None] < n_global
    return is_global, lambda x: F.pad(x, (0, 0, 0, room))[:, :, :room]


def _anywhere(global_mask: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the same two results as `_first`, for the global tokens of a mask (B, N): as many as the row with most has, at least 1."""
    most = max(int(global_mask.sum(1).max()), 1)
    places = global_mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]  # (B, G)
    is_global = global_mask[:, None, :, None]
    return is_global, lambda x: x.gather(2, places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


class GlobalHeads(EqualHeads):
    """Heads with projections for global tokens, `to_q_global`, `to_k_global` and `to_v_global`, beside those for all tokens."""

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool | None = None) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        width, bias = n_heads * self.d_head, self.biased if bias is None else bias
        self.to_q_global, self.to_k_global, self.to_v_global = (nn.Linear(d_model, width, bias=bias) for _ in range(3))
        self.begin()

    def begin(self) -> None:
        """Initialise the projections for global tokens as copies of those for all tokens, as in section 3.2 of Beltagy et al. 2020."""
        pairs = ((self.to_q, self.to_q_global), (self.to_k, self.to_k_global), (self.to_v, self.to_v_global))
        for local, of_globals in pairs:
            of_globals.load_state_dict(local.state_dict())

    def heads_of_globals(self, x: Tensor, rotation: Rotation | None, dtype: torch.dtype | None = None) -> Heads:
        """Return q, k and v as `heads` does, but computed by the projections for global tokens."""
        return heads_of(x, (self.to_q_global, self.to_k_global, self.to_v_global), self.n_heads, rotation, dtype)


class LongformerAttention(GlobalHeads, EncoderLayer):
    """Multi-head attention in windows of w / 2 tokens on either side, in which the first n_global tokens are global. Raises ValueError for
    an odd window.
    """

    capabilities = Capabilities(cross=False, pads_to="block", rotates=True, ordered=True, weights="pattern")
    cost = Cost("O(N (w + C + G) D)", lambda N, s: 2 * N * min(N, s.window + 64 + 2 * s.n_global) * s.D)
    examples = Examples(
        small={"window": 6, "n_global": 2, "block": 4},
        large={"window": 128, "n_global": 1},
        short={"window": 8, "n_global": 1, "block": 8},
        varied=("window", (64, 128, 256, 512)),
    )

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = True,
        window: int = 512,
        n_global: int = 1,
        dilation: int | Sequence[int] = 1,
        block: int = 64,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        if window % 2 or window < 0:
            raise ValueError(f"window={window} must be even and at least 0: half of it lies on either side of a token")
        if not isinstance(dilation, int) and len(dilation) != n_heads:
            raise ValueError(f"dilation has {len(dilation)} entries for n_heads={n_heads}; give one, or one for each head")
        at_least("dilation", dilation if isinstance(dilation, int) else min(dilation), 1, "with 1, a window has no gaps")
        self.window, self.dilation = window, dilation
        self.n_global = at_least("n_global", n_global, 0, "with 0, it is local attention")
        self.block = at_least("block", block, 1, "it is a number of tokens")

    def mix(self, x: Tensor, key_mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        local, of_globals = self.heads(x, rotation), self.heads_of_globals(x, rotation)
        options: dict[str, Any] = {"window": self.window, "n_global": self.n_global, "dilation": self.dilation, "block": self.block}
        return self.to_out(merge_heads(attend_longformer(local, of_globals, **options, key_mask=key_mask)))
