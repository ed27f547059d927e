"""BigBird: a block of tokens sees its two neighbour blocks, the first and the last block, and a few random blocks.

Blocks 0 and n - 1 of n = N / b blocks of b tokens see everything. A block i between them sees blocks 0, n - 1, i - 1, i, i + 1 and r random
blocks, drawn for each head; a block that is drawn twice counts once. In a row of at most 5 + 2 r blocks every token sees everything. n is
the number of blocks of the row that contain tokens, so neither padding nor other rows change what a token sees. Zaheer et al. 2020,
arXiv:2007.14062, section 2 (ITC). O(N b (5 + 2 r) D_k) time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, of_nothing, refuse_cross
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import Cost, Examples
from models.attention.layers.scaled_dot_product import attend
from models.attention.sparse.blocks import in_blocks, keys_present, out_of_blocks
from models.parts.checks import at_least


def attend_bigbird(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    *,
    block: int,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    full_up_to: int = 0,
) -> Tensor:
    """Compute BigBird attention: q, k (B, H, N, D_k), v (B, H, N, D_v), key_mask bool (B, N) -> (B, H, N, D_v), or 0 if there is no key.

    table: int64 (H, n - 2, r), the random key blocks of query blocks 1 .. n - 2, n = ceil(N / block); numbers outside 0 .. n - 1 are
    ignored. full_up_to: with at most this number of blocks, all tokens see everything.
    """
    n = (q.shape[2] + block - 1) // block
    n_blocks = torch.full((1, 1, 1), n, device=q.device)
    fixed = _fixed_blocks(n, n_blocks).expand(1, table.shape[0], -1, -1)
    lists = torch.cat([fixed, F.pad(table, (0, 0, 1, 1), value=-1)[None, :, :n]], dim=-1)  # no random blocks for blocks 0 and n - 1
    if n <= full_up_to:
        lists = torch.arange(n, device=q.device).expand(1, table.shape[0], n, n)
    return attend_to_lists(q, k, v, lists, n_blocks, block=block, scale=scale, key_mask=key_mask)


def attend_to_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    n_blocks: Tensor,
    *,
    block: int,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attend from every query block to the key blocks in its list: q, k (B, H, N, D_k), v (B, H, N, D_v) -> (B, H, N, D_v).

    lists: int64 (B or 1, H, n, L). Repeated entries and entries outside 0 .. n_blocks - 1 are ignored. n_blocks (B or 1, 1, 1): the number
    of blocks of each row that contain tokens. The first and the last of these blocks see everything.
    """
    refuse_cross("BigBird", q=q, k=k, v=v)
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    B, H, N, _ = q.shape
    q = in_blocks(q, block)  # (B, H, n, b, D_k)
    n, present = q.shape[2], keys_present(k, key_mask).expand(B, -1, -1, -1)  # (B, 1, N, 1)
    keys, values, seen = keys_of_lists(k, v, present, lists, n_blocks, block=block)
    o = attend(q, keys, values, scale=scale, mask=seen.unsqueeze(3))  # (B, H, n, b, D_v)

    last = (n_blocks - 1).clamp_min(0)[..., None, None]  # (B or 1, 1, 1, 1, 1)
    q_last = q.gather(2, last.expand(B, H, 1, *q.shape[3:]))
    ends = attend(torch.cat([q[:, :, :1], q_last], dim=2).flatten(2, 3), k, v, scale=scale, mask=present.mT).unflatten(2, (2, block))
    i = torch.arange(n, device=q.device)[:, None, None]
    o = torch.where(i == 0, ends[:, :, :1], torch.where(i == last, ends[:, :, 1:], o))
    return out_of_blocks(o, N)


def keys_of_lists(k: Tensor, v: Tensor, present: Tensor, lists: Tensor, n_blocks: Tensor, *, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the listed blocks for each query block. Return keys, values (B, H, n, L b, ..) and whether each counts, bool (B, H, n, L b).

    k (B, H, N, D_k), v (B, H, N, D_v), present bool (B, 1, N, 1); lists and n_blocks as in `attend_to_lists`.
    """
    k, v, present = (in_blocks(x, block) for x in (k, v, present))  # (B, H, n, b, ..)
    B, H, n = k.shape[:3]
    place = torch.arange(lists.shape[3], device=k.device)
    repeated = ((lists[..., :, None] == lists[..., None, :]) & (place < place[:, None])).any(-1)
    counts = (lists >= 0) & (lists < n_blocks[..., None]) & ~repeated  # (B, H, n, L)
    lists = lists.clamp_min(0).minimum(torch.full_like(lists, n - 1)).expand(B, -1, -1, -1)
    row = torch.arange(B, device=k.device)[:, None, None, None]
    head = torch.arange(H, device=k.device)[:, None, None]
    keys, values = (x.flatten(0, 2)[(row * H + head) * n + lists].flatten(3, 4) for x in (k, v))
    seen = present.squeeze(-1).flatten(0, 2)[row * n + lists] & counts.unsqueeze(-1)  # (B, H, n, L, b)
    return keys, values, seen.flatten(3, 4)


def random_blocks(draws: Tensor, n_blocks: Tensor) -> Tensor:
    """Choose r different blocks for every query block, among those that it does not see anyway: draws (H, n, r), random int64 >= 0,
    n_blocks (.., 1, 1) -> (.., H, n, r). By Floyd's sampling (Bentley & Floyd 1987), draw t chooses one of the first L - r + t + 1 of the L
    eligible blocks, or the last of these if an earlier draw has chosen the same. If fewer than r are eligible, some are equal or seen
    anyway.
    """
    i = torch.arange(draws.shape[1], device=draws.device)
    before = (i - 2).clamp_min(0)  # the eligible blocks are 1 .. i - 2 and i + 2 .. n - 2
    legal = before + (n_blocks - 3 - i).clamp_min(0)  # (.., 1, n)
    ranks: list[Tensor] = []
    for t in range(draws.shape[2]):
        largest = (legal - draws.shape[2] + t).clamp_min(0)
        rank = draws[..., t] % (largest + 1)  # (.., H, n)
        for earlier in ranks:
            rank = torch.where(rank == earlier, largest, rank)
        ranks.append(rank)
    rank = torch.stack(ranks, dim=-1) if ranks else draws.expand(*legal.shape[:-2], -1, -1, -1)
    return torch.where(rank < before[:, None], rank + 1, rank - before[:, None] + i[:, None] + 2)


def _fixed_blocks(n: int, n_blocks: Tensor) -> Tensor:
    """Return the blocks that a query block i always sees, 0, n_blocks - 1, i - 1, i and i + 1, for i = 0 .. n - 1: (B or 1, 1, n, 5)."""
    i = torch.arange(n, device=n_blocks.device) + 0 * n_blocks  # (B or 1, 1, n)
    return torch.stack([0 * i, n_blocks - 1 + 0 * i, i - 1, i, i + 1], dim=-1)


class BigBirdAttention(EqualHeadsEncoderLayer):
    """Multi-head attention to neighbour, first, last and random blocks. Raises ValueError if N > n_positions or a size is invalid. The
    random numbers `draws` (H, n_positions / block, n_random) are saved with the weights.
    """

    capabilities = Capabilities(cross=False, pads_to="block", rotates=True, ordered=True, weights="pattern")
    cost = Cost("O(N b (5 + 2 r) D)", lambda N, s: 2 * N * min(N, s.block * (5 + 2 * s.n_random)) * s.D)
    examples = Examples(
        small={"block": 3, "n_random": 1},
        large={"block": 64, "n_random": 3},
        short={"block": 4, "n_random": 1},
        varied=("block", (16, 32, 64, 128)),
    )

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = True,
        block: int = 64,
        n_random: int = 3,
        n_positions: int = 4096,
        seed: int = 0,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.block = at_least("block", block, 1, "it is a number of tokens")
        self.n_random = at_least("n_random", n_random, 0, "it is a number of blocks")
        self.n_positions = at_least("n_positions", n_positions, 1, "it is the longest input")
        shape = (n_heads, -(-n_positions // block), n_random)
        self.draws: Tensor
        self.register_buffer("draws", torch.randint(2**31, shape, generator=torch.Generator().manual_seed(seed)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        N = q.shape[2]
        if not torch.compiler.is_exporting() and self.n_positions < N:
            raise ValueError(f"N={N} tokens, but the layer has n_positions={self.n_positions}; cut the input, or build it for more")
        n = (N + self.block - 1) // self.block
        place = torch.arange(N, device=q.device) + 1
        lengths = F.pad(place * key_mask, (1, 0)).amax(1) if key_mask is not None else place[-1:]  # (B or 1,)
        n_blocks = ((lengths + self.block - 1) // self.block)[:, None, None]
        lists = self.lists(n, n_blocks)
        return attend_to_lists(q, k, v, lists, n_blocks, block=self.block, key_mask=key_mask)

    def lists(self, n: int, n_blocks: Tensor) -> Tensor:
        """Return the key blocks of every query block: n_blocks (B, 1, 1) of each row -> (B, H, n, L), L = min(n, 5 + 2 r). Short rows list
        all blocks.
        """
        L = 5 + 2 * self.n_random
        drawn = random_blocks(self.draws[:, :n], n_blocks)  # (B, H, n, r)
        fixed = _fixed_blocks(n, n_blocks).expand(-1, self.n_heads, -1, -1)
        sparse = F.pad(torch.cat([fixed, drawn], dim=-1), (0, self.n_random), value=-1)
        lists = torch.where(n_blocks[..., None] <= L, torch.arange(L, device=drawn.device), sparse)
        return lists[..., : torch.sym_min(n, L)]
