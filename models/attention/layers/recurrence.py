"""The one recurrence behind every layer whose past is a matrix of constant size, and three ways to execute it.

    S_t = exp(a_t) S_{t-1} + k_t w_tᵀ,   o_t = S_tᵀ q_t,   with what is written
    w_t = v_t                                         linear (no a), gated
    w_t = β_t (v_t - (exp(a_t) S_{t-1})ᵀ k_t)         delta (no a), gated delta: only what S does not know of k_t yet

a_t <= 0 is a log-decay, one number a head (retention, Mamba-2, gated delta) or one for each of the D_k rows of S (gated linear attention).
Katharopoulos et al. 2020, arXiv:2006.16236, eqs. 16-20; Sun et al. 2023, arXiv:2307.08621, eqs. 5-7; Yang et al. 2023, arXiv:2312.06635;
Yang et al. 2024, arXiv:2406.06484 (the delta rule in chunks) and arXiv:2412.06464 (with a gate).

`parallel`, `chunkwise` and `recurrent` are the same function. They take q, k (B, H, N, D_k), v (B, H, N, D_v), S (B, H, D_k, D_v), and by
keyword decay (B, H, N) or (B, H, N, D_k) and beta (B, H, N); which of the two are given chooses the rule. They give o (B, H, N, D_v) and
the new S, in float32 at least whatever the inputs' dtype, and under autocast too: S and o grow like N, so that a half-precision sum stalls
and a half-precision o overflows before the norm that follows it. Nothing is scaled. A token with k = 0, decay 0 and beta 0 is padding: it
leaves S bit for bit as it was.

A head costs O(N²) in parallel, O(N C) in chunks of C, O(N D_k D_v) one by one; every exponent that is taken is <= 0.
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
Execution = Callable[..., tuple[Tensor, Tensor]]  # one of the three functions below
CHUNK_OF_ROWS = 8  # where every row of S has a decay of its own: its C² differences are then taken D_k times over


def _in_full_precision(execution: Execution) -> Execution:
    """Cast the inputs to float32 or, where one of them is, to float64; (B, H, N) become (B, H, N, 1)."""

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
    """One token after the other: the definition, and what a step of decoding is."""
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
    """All tokens at once, as one chunk."""
    return _advance(_within(q, k, v, decay, beta), S)


@_in_full_precision
def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What happens inside the chunks for all of them at once, then S from chunk to chunk. `chunk` is in tokens, CHUNK unless given."""
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
    """(B, H, N, ..) -> (B, H, chunks, C, ..), the last one filled up with zeros, which is padding."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % C)).unflatten(2, (-1, C))


class _Chunk(NamedTuple):
    """What a chunk of C tokens is before it meets the S of its past; leading axes are free."""

    scores: Tensor  # (.., C, C), of token i with j <= i, the decay between them included
    q: Tensor  # (.., C, D_k), decayed since the chunk began
    k: Tensor  # (.., C, D_k), decayed until the chunk ends
    kept: Tensor | None  # (.., D_k or 1, 1), how much of S is left at the end; None: all
    written: Tensor  # (.., C, D_v), w of every token, as if S were 0
    erased: Tensor | None  # (.., C, D_k), what is taken from w for each row of S; None without the delta rule


def _within(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None) -> _Chunk:
    """(.., C, D_k) twice, (.., C, D_v), (.., C, D_k or 1), (.., C, 1). Yang et al. 2024, arXiv:2406.06484, eqs. 8-11."""
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
    """A chunk meets its past: S (.., D_k, D_v) -> o (.., C, D_v) and S at the end of the chunk."""
    w = chunk.written if chunk.erased is None else chunk.written - chunk.erased @ S
    o = chunk.q @ S + chunk.scores @ w
    left = S if chunk.kept is None else chunk.kept * S
    return o, left + chunk.k.mT @ w


def _segment_sums(decay: Tensor) -> Tensor:
    """(.., C, D) -> (.., C, C, D): [i, j] is the sum of decay over j < t <= i, and 0 for i <= j.

    Summed term by term. The difference of two cumulative sums would lose the digits of a small decay after a large one, and the product of
    exp(g_i) and exp(-g_j) overflows.
    """
    C = decay.shape[-2]
    after = torch.ones(C, C, dtype=torch.bool, device=decay.device).tril(-1).unsqueeze(-1)  # [t, j]: t > j
    return torch.where(after, decay.unsqueeze(-2), 0.0).cumsum(-3)


def _scores(q: Tensor, k: Tensor, between: Tensor | None) -> Tensor:
    """[i, j] = sum over d of q_id k_jd between_ijd: (.., C, D_k), same, (.., C, C, D_k or 1) -> (.., C, C)."""
    if between is None:
        return q @ k.mT
    if between.shape[-1] == 1:
        return (q @ k.mT) * between.squeeze(-1)
    return (q.unsqueeze(-2) * between * k.unsqueeze(-3)).sum(-1)


def _solve(L: Tensor, *right: Tensor) -> tuple[Tensor, ...]:
    """x of (I + the part of L below its diagonal) x = b, for each b (.., C, D): L (.., C, C).

    By substitution. The inverse as a power series, (I - L)(I + L²)(I + L⁴).., is equal on paper only: for keys that repeat, the entries of
    L^m are binomial coefficients, which reach 10¹⁸ at C = 64 and cancel.
    """
    x = torch.linalg.solve_triangular(L, torch.cat(right, dim=-1), upper=False, unitriangular=True)
    return x.split([b.shape[-1] for b in right], dim=-1)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor
