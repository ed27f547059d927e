"""The Reformer: reversible blocks of LSH attention or local attention, with axial positions.

x1 = x2 = tokens + positions;   block:  y1 = x1 + attention(norm(x2)),   y2 = x2 + feedforward(norm(y1))
The output is norm([y1 | y2]), of width 2 D.
Axial positions: position t = n_2 a + b has the embedding [row a of a table (n_1, D_1) | row b of a table (n_2, D_2)],
with D_1 + D_2 = D.
Kitaev et al. 2020, arXiv:2001.04451. Local attention and axial positions follow the public code of this paper.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.layers.scaled_dot_product import attend
from models.attention.sparse.blocks import in_blocks, out_of_blocks
from models.attention.sparse.lsh import LSHAttention
from models.attention.sparse.lsh_buckets import Buckets
from models.parts.feedforward import ACTIVATIONS, ChunkedFeedForward
from models.reformer.reversible import ReversibleBlock, ReversibleStack


@dataclass(frozen=True, kw_only=True)
class ChunkSpan:
    """`length`: tokens in a chunk. `before`, `after`: numbers of chunks before and after a token's own chunk to which the token attends."""

    length: int
    before: int = 1
    after: int = 0


@dataclass(frozen=True, kw_only=True)
class ReformerConfig:
    """The hyperparameters of a Reformer. Raises ValueError, with the values, if they are invalid or do not fit together."""

    vocab_size: int
    d_model: int
    n_heads: int
    d_head: int
    d_feedforward: int
    n_positions: int
    layers: tuple[Literal["lsh", "local"], ...]
    axial_shape: tuple[int, int] | None = None  # (n_1, n_2); None: one position table
    axial_widths: tuple[int, int] | None = None  # (D_1, D_2)
    lsh_chunks: ChunkSpan
    local_chunks: ChunkSpan
    n_rounds: int
    n_buckets: Buckets
    causal: bool = False
    n_logits: int = 0  # 0: no language-modelling head
    activation: str = "relu"
    norm_eps: float = 1e-12
    feedforward_chunk: int = 1024  # tokens in one call of the feed-forward layer

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.layers) - {"lsh", "local"}):
            raise ValueError(f"layers hold {unknown[0]!r}, which is not one of lsh, local")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.axial_shape is not None:
            if self.axial_widths is None or sum(self.axial_widths) != self.d_model:
                raise ValueError(f"axial_widths={self.axial_widths} must add up to d_model={self.d_model}")
            if self.axial_shape[0] * self.axial_shape[1] < self.n_positions:
                raise ValueError(f"axial_shape={self.axial_shape} has fewer places than n_positions={self.n_positions}")


class Reformer(nn.Module):
    """A Reformer from token ids to token vectors of width 2 D, or to logits if it has a language-modelling head."""

    def __init__(self, config: ReformerConfig) -> None:
        super().__init__()
        self.config = c = config
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        tables: Iterable[tuple[int, int]] = [(c.n_positions, c.d_model)]
        if c.axial_shape is not None and c.axial_widths is not None:
            tables = zip(c.axial_shape, c.axial_widths, strict=True)
        self.positions = nn.ModuleList(nn.Embedding(*table) for table in tables)
        self.blocks = ReversibleStack(ReversibleBlock(NormedAttention(c, i), NormedFeedForward(c)) for i in range(len(c.layers)))
        self.norm = nn.LayerNorm(2 * c.d_model, eps=c.norm_eps)
        self.head = nn.Linear(2 * c.d_model, c.n_logits) if c.n_logits else nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute vectors (B, N, 2 D), or logits (B, N, n_logits), from ids and mask (B, N) int64. attention_mask is 1 for a
        token and 0 for padding. The outputs of padding are undefined.

        Raises ValueError for N > n_positions.
        """
        N, limit = input_ids.shape[1], self.config.n_positions
        if not torch.compiler.is_exporting() and limit < N:
            raise ValueError(f"N={N} tokens, but the model has n_positions={limit}; cut the input")
        x = self.tokens(input_ids) + self._positions(torch.arange(N, device=input_ids.device))
        return self.head(self.norm(torch.cat(self.blocks(x, x, attention_mask != 0), dim=-1)))

    def _positions(self, t: Tensor) -> Tensor:
        """Return the position embeddings of t: (N,) -> (N, D)."""
        if self.config.axial_shape is None:
            return self.positions[0](t)
        n_2 = self.config.axial_shape[1]
        return torch.cat([self.positions[0](t // n_2), self.positions[1](t % n_2)], dim=-1)


class NormedAttention(nn.Module):
    """The function F of a reversible block, a norm and attention: (B, N, D), bool (B, N) -> (B, N, D)."""

    def __init__(self, config: ReformerConfig, i: int) -> None:
        super().__init__()
        c = config
        self.norm = nn.LayerNorm(c.d_model, eps=c.norm_eps)
        self.layer: ChunkAttention | LSHAttention
        if c.layers[i] == "local":
            self.layer = ChunkAttention(c.d_model, c.n_heads, c.d_head, chunks=c.local_chunks, causal=c.causal)
        else:
            self.layer = LSHAttention(
                c.d_model,
                c.n_heads,
                d_head=c.d_head,
                bias=False,
                n_rounds=c.n_rounds,
                n_buckets=c.n_buckets,
                chunk=c.lsh_chunks.length,
                before=c.lsh_chunks.before,
                after=c.lsh_chunks.after,
                rule="chunk",
                eps=1e-6,
                causal=c.causal,
                seed=i,
            )

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        return self.layer(self.norm(x), key_mask)


class NormedFeedForward(nn.Module):
    """The function G of a reversible block: a norm and the feed-forward layer, on each token on its own."""

    def __init__(self, config: ReformerConfig) -> None:
        super().__init__()
        c = config
        self.norm = nn.LayerNorm(c.d_model, eps=c.norm_eps)
        self.layer = ChunkedFeedForward(
            c.d_model, c.d_feedforward, activation=c.activation, gated=False, bias=True, chunk=c.feedforward_chunk
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


class ChunkAttention(nn.Module):
    """Softmax attention to a token's own chunk and neighbouring chunks. The chunks form a circle: the first one follows the last.

    Published weights were trained with this circle. The circle of a row ends with the chunk that has its last token, so that padding
    does not change the result. With `causal`, no token attends to later tokens.
    """

    def __init__(self, d_model: int, n_heads: int, d_head: int, *, chunks: ChunkSpan, causal: bool) -> None:
        super().__init__()
        self.n_heads, self.chunks, self.causal = n_heads, chunks, causal
        self.scale = d_head**-0.5
        self.to_q = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.to_k = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.to_v = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.to_out = nn.Linear(n_heads * d_head, d_model, bias=False)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        """Compute the attention: x (B, N, D), key_mask bool (B, N) -> (B, N, D)."""
        N, C = x.shape[1], self.chunks.length
        q, k, v = (in_blocks(split_heads(to(x), self.n_heads), C) for to in (self.to_q, self.to_k, self.to_v))  # (B, H, n, C, D_k)
        n, place = k.shape[2], torch.arange(N, device=x.device) + 1
        n_filled = ((F.pad(place * key_mask, (1, 0)).amax(1) + C - 1) // C).clamp_min(1)[:, None, None]  # (B, 1, 1)
        offset = torch.arange(-self.chunks.before, self.chunks.after + 1, device=x.device)
        source = (torch.arange(n, device=x.device)[:, None] + offset) % n_filled  # (B, n, W)
        is_once = offset + self.chunks.before < n_filled  # (B, 1, W): if fewer than W chunks have tokens, use each only once
        here = in_blocks(key_mask[:, None, :, None], C)[:, 0, :, :, 0]  # (B, n, C)
        seen = (_chunks_at(here.unsqueeze(1), source) & is_once.repeat_interleave(C, -1).unsqueeze(1)).unsqueeze(3)  # (B, 1, n, 1, W C)
        if self.causal:
            position = torch.arange(n * C, device=x.device).unflatten(0, (-1, C))  # (n, C)
            seen = seen & (_chunks_at(position.expand(x.shape[0], 1, -1, -1), source).unsqueeze(3) <= position.unsqueeze(-1))
        o = attend(q, _chunks_at(k, source), _chunks_at(v, source), scale=self.scale, mask=seen)
        return self.to_out(merge_heads(out_of_blocks(o, N)))


def _chunks_at(x: Tensor, source: Tensor) -> Tensor:
    """Return the chunks with the indices `source` int64 (B, n, W), concatenated: (B, H, n, C, ..) -> (B, H, n, W C, ..)."""
    at = source.flatten(1).view(x.shape[0], 1, -1, *[1] * (x.dim() - 3)).expand(-1, x.shape[1], -1, *x.shape[3:])
    return x.gather(2, at).unflatten(2, source.shape[1:]).flatten(3, 4)
