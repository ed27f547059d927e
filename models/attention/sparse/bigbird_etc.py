"""BigBird with separate global tokens (ETC): g tokens before the sequence see everything and are seen by all.

The N tokens after them form n = N / b blocks. A token of block i sees the g global tokens, blocks i - 1, i, i + 1 and r random blocks;
a block listed twice counts once. Unlike in bigbird.py, no block sees everything or is seen by all. Zaheer et al. 2020, arXiv:2007.14062,
section 2 (the variant of the extended transformer construction, of Ainslie et al. 2020, arXiv:2004.08483). O(N (g + b (3 + r)) D_k) time
a head. This is a function only: the layer `bigbird` and the published checkpoints have the variant of bigbird.py.
"""

import torch
from torch import Tensor

from models.attention.layers.capabilities import refuse_cross
from models.attention.layers.scaled_dot_product import attend
from models.attention.sparse.bigbird import keys_of_lists
from models.attention.sparse.blocks import in_blocks, keys_present, out_of_blocks


def attend_bigbird_etc(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, *, n_global: int, block: int, scale: float | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """Compute BigBird-ETC: q, k (B, H, g + N, D_k), v (B, H, g + N, D_v), key_mask bool (B, g + N) -> (B, H, g + N, D_v).

    The output is 0 if there is no key. n_global: g. block: b. table: int64 (H, n, r), the random key blocks of every query block,
    n = ceil(N / b); numbers outside 0 .. n - 1 are ignored. `scale` defaults to D_k^-1/2. Raises ValueError if the table is for another n.
    """
    refuse_cross("BigBird", q=q, k=k, v=v)
    g, present = n_global, keys_present(k, key_mask).expand(len(k), -1, -1, -1)  # (B, 1, g + N, 1)
    of_globals = attend(q[:, :, :g], k, v, scale=scale, mask=present.mT)
    q_blocks = in_blocks(q[:, :, g:], block)  # (B, H, n, b, D_k)
    n = q_blocks.shape[2]
    if table.shape[1] != n:
        raise ValueError(f"table has random blocks for {table.shape[1]} blocks, and {q.shape[2] - g} tokens are {n} blocks of {block}")
    i = torch.arange(n, device=q.device)
    neighbours = torch.stack([i - 1, i, i + 1], dim=-1).expand(1, q.shape[1], -1, -1)
    lists = torch.cat([neighbours, table[None]], dim=-1)  # (1, H, n, 3 + r)
    n_blocks = torch.full((1, 1, 1), n, device=q.device)
    keys, values, seen = keys_of_lists(k[:, :, g:], v[:, :, g:], present[:, :, g:], lists, n_blocks, block=block)
    in_front = [x[:, :, None, :g].expand(-1, -1, n, -1, -1) for x in (k, v)]  # (B, H, n, g, ..)
    seen_in_front = present[:, :, None, :g, 0].expand(-1, q.shape[1], n, -1)
    keys, values = torch.cat([in_front[0], keys], dim=3), torch.cat([in_front[1], values], dim=3)  # (B, H, n, g + (3 + r) b, ..)
    seen = torch.cat([seen_in_front, seen], dim=3).unsqueeze(3)  # (B, H, n, 1, g + (3 + r) b)
    o = attend(q_blocks, keys, values, scale=scale, mask=seen)
    return torch.cat([of_globals, out_of_blocks(o, q.shape[2] - g)], dim=2)
