"""The recurrence of all layers whose state is a matrix of constant size, and three ways to execute it.

    S_t = exp(a_t) S_{t-1} + k_t w_tᵀ,   o_t = S_tᵀ q_t
    w_t = v_t                                         in linear attention (a_t = 0) and gated linear attention
    w_t = β_t (v_t - (exp(a_t) S_{t-1})ᵀ k_t)         in the delta rule (a_t = 0) and the gated delta rule

a_t <= 0 is a log-decay: one number a head, or one for each of the D_k rows of S. Katharopoulos et al. 2020, arXiv:2006.16236, eqs. 16-20;
Sun et al. 2023, arXiv:2307.08621, eqs. 5-7; Yang et al. 2023, arXiv:2312.06635; Yang et al. 2024, arXiv:2406.06484 and arXiv:2412.06464.

`parallel`, `chunkwise` and `recurrent` compute the same function of q, k (B, H, N, D_k), v (B, H, N, D_v), S (B, H, D_k, D_v) and, by
keyword, decay a (B, H, N) or (B, H, N, D_k) and beta β (B, H, N). They return o (B, H, N, D_v) and the new S, in float32 at least, under
autocast too. The caller scales q. A token with k = 0, decay 0 and beta 0 is padding: it leaves S bit for bit unchanged. A head takes O(N²
(D_k + D_v)) time in parallel, O(N (C (D_k + D_v) + D_k D_v)) in chunks of C tokens, and O(N D_k D_v) token by token.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import of_nothing, refuse_cross

CHUNK = 64
Execution = Callable[..., tuple[Tensor, Tensor]]  # `parallel`, `chunkwise` or `recurrent`
CHUNK_OF_ROWS = 8  # tokens in a chunk if each of the D_k rows of S has its own decay: then C² D_k decays must be computed for a chunk


def _in_full_precision(execution: Execution) -> Execution:
    """Cast the inputs to float64 if v or S is float64, else to float32, and give decay and beta (B, H, N) the shape (B, H, N, 1)."""

    @wraps(execution)
    def run(
        q: Tensor, k: Tensor, v: Tensor, S: Tensor, *, decay: Tensor | None = None, beta: Tensor | None = None, **chunk: int
    ) -> tuple[Tensor, Tensor]:
        refuse_cross("a recurrence", q=q, k=k, v=v)
        exact = torch.promote_types(torch.promote_types(v.dtype, S.dtype), torch.float32)
        if (nothing := of_nothing(q, k, v)) is not None:
            return nothing.to(exact), S.to(exact)
        if decay is not None:
            decay = (decay if decay.dim() == 4 else decay.unsqueeze(-1)).to(exact)
        if beta is not None:
            beta = beta.unsqueeze(-1).to(exact)
        device = v.device.type
        mixed = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if mixed else nullcontext():
            return execution(q.to(exact), k.to(exact), v.to(exact), S.to(exact), decay=decay, beta=beta, **chunk)

    return run


@_in_full_precision
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor, *, decay: Tensor | None = None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Process one token after the other. This is the definition of the recurrence, and one decode step if N = 1."""
    outputs = []
    for t in range(q.shape[2]):
        q_t, k_t = q[:, :, t, :, None], k[:, :, t, :, None]  # (B, H, D_k, 1)
        w_t = v[:, :, t, None, :]  # (B, H, 1, D_v)
        if decay is not None:
            S = S * decay[:, :, t, :, None].exp()
        if beta is not None:
            w_t = beta[:, :, t, None, :] * (w_t - k_t.mT @ S)
        S = S + k_t * w_t
        outputs.append(q_t.mT @ S)  # (B, H, 1, D_v)
    return torch.cat(outputs, dim=2), S


@_in_full_precision
def parallel(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor, *, decay: Tensor | None = None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Process all tokens at once, as one chunk."""
    return _advance(_within(q, k, v, decay, beta), S)


@_in_full_precision
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor, *, decay: Tensor | None = None, beta: Tensor | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute for all chunks at once what depends on a single chunk, then S from chunk to chunk. chunk: tokens of a chunk; None:
    CHUNK_OF_ROWS if each row of S has its own decay, else CHUNK.
    """
    N, per_row = q.shape[2], decay is not None and decay.shape[-1] == q.shape[-1]
    C = min(N, chunk or (CHUNK_OF_ROWS if per_row else CHUNK))
    in_chunks: list[Any] = [None if x is None else _in_chunks(x, C) for x in (q, k, v, decay, beta)]
    inside = _within(*in_chunks)
    outputs = []
    for c in range(-(-N // C)):
        here: list[Any] = [None if x is None else x[:, :, c] for x in inside]
        o, S = _advance(_Chunk(*here), S)
        outputs.append(o)
    return torch.cat(outputs, dim=2)[:, :, :N], S


def _in_chunks(x: Tensor, C: int) -> Tensor:
    """Split x into chunks: (B, H, N, ..) -> (B, H, chunks, C, ..). The last chunk is filled up with zeros, which count as padding."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % C)).unflatten(2, (-1, C))


class _Chunk(NamedTuple):
    """The parts of a chunk of C tokens that do not depend on S before the chunk. Leading axes are arbitrary."""

    scores: Tensor  # (.., C, C), scores of tokens i and j <= i, times the decay between them
    q: Tensor  # (.., C, D_k), queries times the decay since the chunk's start
    k: Tensor  # (.., C, D_k), keys times the decay until the chunk's end
    kept: Tensor | None  # (.., D_k or 1, 1), the factor by which S before the chunk decays over the whole chunk; None: 1
    written: Tensor  # (.., C, D_v), the written value w of every token if S were 0
    erased: Tensor | None  # (.., C, D_k); its product with S before the chunk is subtracted from `written`; None without the delta rule


def _within(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None) -> _Chunk:
    """Compute the `_Chunk` of q, k (.., C, D_k), v (.., C, D_v), decay (.., C, D_k or 1), beta (.., C, 1): arXiv:2406.06484, eqs. 8-11."""
    since_start = until_end = between = kept = None
    if decay is not None:
        sums = _segment_sums(decay)
        between = sums.exp()  # (.., C, C, D_k or 1)
        since_start = decay.cumsum(-2).exp()  # (.., C, D_k or 1), the token's own decay included
        until_end = between[..., -1, :, :]  # (.., C, D_k or 1), the token's own decay not included
        kept = since_start[..., -1, :, None]
    scores = _scores(q, k, between).tril()
    q_in, k_in, k_out = _times(q, since_start), _times(k, since_start), _times(k, until_end)
    if beta is None:
        return _Chunk(scores, q_in, k_out, kept, v, None)
    written, erased = _solve(beta * _scores(k, k, between), beta * v, beta * k_in)
    return _Chunk(scores, q_in, k_out, kept, written, erased)


def _advance(chunk: _Chunk, S: Tensor) -> tuple[Tensor, Tensor]:
    """Combine a chunk with S before the chunk, (.., D_k, D_v). Return o (.., C, D_v) and S at the end of the chunk."""
    w = chunk.written if chunk.erased is None else chunk.written - chunk.erased @ S
    o = chunk.q @ S + chunk.scores @ w
    left = S if chunk.kept is None else chunk.kept * S
    return o, left + chunk.k.mT @ w


def _segment_sums(decay: Tensor) -> Tensor:
    """Return the log-decay between every two tokens: (.., C, D) -> (.., C, C, D). [i, j] is the sum over j < t <= i, or 0 if i <= j. A
    difference of cumulative sums would lose the digits of a small decay after a large one.
    """
    C = decay.shape[-2]
    after = torch.ones(C, C, dtype=torch.bool, device=decay.device).tril(-1).unsqueeze(-1)  # entry [t, j] is True if t > j
    return torch.where(after, decay.unsqueeze(-2), 0.0).cumsum(-3)


def _scores(q: Tensor, k: Tensor, between: Tensor | None) -> Tensor:
    """Return scores (.., C, C) with [i, j] = sum over d of q_id k_jd between_ijd: q, k (.., C, D_k), between (.., C, C, D_k or 1)."""
    if between is None:
        return q @ k.mT
    if between.shape[-1] == 1:
        return (q @ k.mT) * between.squeeze(-1)
    return (q.unsqueeze(-2) * between * k.unsqueeze(-3)).sum(-1)


def _solve(L: Tensor, *right: Tensor) -> tuple[Tensor, ...]:
    """Solve (I + M) x = b for each b (.., C, D) in `right`, where M is the part of L (.., C, C) below its diagonal. The rows are solved one
    after the other, because the terms of a power series reach 10¹⁸ and cancel if keys repeat.
    """
    x = torch.linalg.solve_triangular(L, torch.cat(right, dim=-1), upper=False, unitriangular=True)
    return x.split([b.shape[-1] for b in right], dim=-1)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor
