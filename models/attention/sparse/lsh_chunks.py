"""Tokens sorted by their buckets and cut into chunks: the order of tokens in a round of hashing.

B batch, H heads, R rounds, N' tokens, a multiple of the chunk length C; a token sees W = before + 1 + after chunks. All are int64 and bool.
Nothing but plain sorts of unique keys and gathers, which every runtime does alike.
"""

import torch
from torch import Tensor

PADDING = 2**62  # above bucket * N' + position of every token


def by_bucket(buckets: Tensor, real: Tensor) -> Tensor:
    """Tokens in the order of (bucket, position), padding last. Keys are unique, so that every sort gives the same order."""
    N = buckets.shape[-1]
    position = torch.arange(N, device=buckets.device)
    return torch.where(real.unsqueeze(2), buckets * N, PADDING).add(position).argsort(-1)


def neighbours(
    order: Tensor, n_filled: Tensor, n_chunks: int, chunk: int, before: int, after: int, *, across_rounds: bool = False
) -> tuple[Tensor, Tensor]:
    """The W C tokens in the W = before + 1 + after chunks around each chunk, and which of them count: (B, H, R, chunks, W C) each.

    The chunks with a token are a circle, for each row of a batch: what it sees does not depend on how far it is padded. A round's n_filled
    chunks are a circle of their own or, with `across_rounds`, all rounds' chunks are one: the first chunk of a round then comes after the
    last one of the round before. A row of one chunk has full attention in every round. Where the circle is shorter than W, each of its
    chunks counts once.
    """
    n, offset = n_filled.unsqueeze(1), torch.arange(-before, after + 1, device=order.device)  # (B, 1, 1, 1), (W,)
    shifted = torch.arange(n_chunks, device=order.device)[:, None] + offset  # (chunks, W)
    rounds = torch.arange(order.shape[2], device=order.device)[:, None, None]
    if across_rounds:
        crossed = (rounds + torch.div(shifted, n, rounding_mode="floor")) % order.shape[2]
        rounds = torch.where(n > 1, crossed, rounds)  # (B, R, chunks, W)
    places = (rounds * order.shape[3] + shifted % n * chunk).unsqueeze(-1) + torch.arange(chunk, device=order.device)
    places = places.flatten(1)[:, None].expand(-1, order.shape[1], -1)  # of all rounds' tokens, one round after the other
    found = order.flatten(2).gather(-1, places).unflatten(-1, (order.shape[2], -1, len(offset) * chunk))
    circle = torch.where(n_filled > 1, order.shape[2] * n_filled, 1) if across_rounds else n_filled  # (B, 1, 1)
    is_once = (offset + before < circle).unsqueeze(-1).expand(-1, -1, -1, chunk).flatten(2)  # (B, 1, W C)
    return found, is_once[:, :, None, None]


def n_rounds_seeing(i: Tensor, j: Tensor, buckets: Tensor, chunks: Tensor, n_filled: Tensor, before: int, after: int) -> Tensor:
    """N_ij: in how many rounds i and j share a bucket, and j's chunk is at most `before` ahead of i's or `after` behind it.

    (B, H, R, chunks, C), (B, H, R, chunks, W C), (B, H, R, N') twice, (B, 1, 1) -> int32 (B, H, R, chunks, C, W C). Bucket and chunk go
    into one number a token, so that each pair takes W comparisons a round.
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
    """x (B, H, N') or (B, H, N', D_k) of the tokens (B, H, ..): (B, H, ..) or (B, H, .., D_k)."""
    flat = tokens.flatten(2)
    if x.dim() == 3:
        return x.gather(2, flat).view_as(tokens)
    return x.gather(2, flat.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])).view(*tokens.shape, x.shape[-1])
