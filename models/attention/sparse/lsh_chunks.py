"""Helpers that sort tokens by bucket and cut them into chunks, for each round of hashing.

B batch, H heads, R rounds, N' tokens, a multiple of the chunk length C; a token sees W = before + 1 + after chunks. All tensors are
int64 or bool. Only sorts of unique keys and gathers are used, which give the same result in every runtime.
"""

import torch
from torch import Tensor

PADDING = 2**62  # a sort key larger than that of any token, which is bucket * N' + position


def by_bucket(buckets: Tensor, real: Tensor) -> Tensor:
    """Return the indices of the tokens, sorted by (bucket, position), with padding last: buckets (B, H, R, N'), real bool (B, H, N') -> (B,
    H, R, N').
    """
    N = buckets.shape[-1]
    position = torch.arange(N, device=buckets.device)
    return torch.where(real.unsqueeze(2), buckets * N, PADDING).add(position).argsort(-1)


def neighbours(
    order: Tensor, n_filled: Tensor, n_chunks: int, chunk: int, before: int, after: int, *, across_rounds: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the W C tokens in the W = before + 1 + after chunks around each chunk, and whether each counts: (B, H, R, chunks, W C) each.

    order (B, H, R, N'): the result of `by_bucket`. The n_filled chunks of a round that have tokens form a circle; with `across_rounds`
    those of all rounds form one. A row of one chunk has full attention. If a circle has fewer than W chunks, each chunk counts once.
    """
    n, offset = n_filled.unsqueeze(1), torch.arange(-before, after + 1, device=order.device)  # (B, 1, 1, 1), (W,)
    shifted = torch.arange(n_chunks, device=order.device)[:, None] + offset  # (chunks, W)
    rounds = torch.arange(order.shape[2], device=order.device)[:, None, None]
    if across_rounds:
        crossed = (rounds + torch.div(shifted, n, rounding_mode="floor")) % order.shape[2]
        rounds = torch.where(n > 1, crossed, rounds)  # (B, R, chunks, W)
    places = (rounds * order.shape[3] + shifted % n * chunk).unsqueeze(-1) + torch.arange(chunk, device=order.device)
    places = places.flatten(1)[:, None].expand(-1, order.shape[1], -1)  # indices into all rounds' tokens
    found = order.flatten(2).gather(-1, places).unflatten(-1, (order.shape[2], -1, len(offset) * chunk))
    circle = torch.where(n_filled > 1, order.shape[2] * n_filled, 1) if across_rounds else n_filled  # (B, 1, 1)
    is_once = (offset + before < circle).unsqueeze(-1).expand(-1, -1, -1, chunk).flatten(2)  # (B, 1, W C)
    return found, is_once[:, :, None, None]


def n_rounds_seeing(i: Tensor, j: Tensor, buckets: Tensor, chunks: Tensor, n_filled: Tensor, before: int, after: int) -> Tensor:
    """Return N_ij, the number of rounds in which token i sees token j, as int32 (B, H, R, chunks, C, W C).

    i sees j in a round if both have the same bucket, and j's chunk is i's or one of `before` chunks in front of it or `after` behind it.
    i (B, H, R, chunks, C), j (B, H, R, chunks, W C): indices of tokens. buckets and chunks (B, H, R, N'): those of each token. n_filled
    (B, 1, 1): number of chunks with tokens. Bucket and chunk are combined into one number, so that each pair takes W comparisons a round.
    """
    count = torch.zeros((), dtype=torch.int32, device=i.device)
    for bucket, chunk in zip(buckets.unbind(2), chunks.unbind(2), strict=True):  # (B, H, N') each
        there = at(bucket * n_filled + chunk, j).unsqueeze(-2)
        seen = torch.zeros((), dtype=torch.bool, device=i.device)
        for offset in range(-before, after + 1):
            seen = seen | (at(bucket * n_filled + (chunk + offset) % n_filled, i).unsqueeze(-1) == there)
        count = count + seen.int()
    return count


def at(x: Tensor, tokens: Tensor) -> Tensor:
    """Gather x (B, H, N') or (B, H, N', D_k) at `tokens` (B, H, ..): returns (B, H, ..) or (B, H, .., D_k)."""
    flat = tokens.flatten(2)
    if x.dim() == 3:
        return x.gather(2, flat).view_as(tokens)
    return x.gather(2, flat.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])).view(*tokens.shape, x.shape[-1])
