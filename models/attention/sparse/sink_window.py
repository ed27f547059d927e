"""Softmax attention to a window and to the first tokens ("attention sinks"): exact up to `window` tokens, of constant size beyond.

o_t = sum_j p_tj v_j,   p_t = softmax of q_t . k_j / sqrt(D_k) over the g first tokens j < g and the recent ones, t - (W - g) < j <= t
Xiao et al. 2023, arXiv:2309.17453. Up to W tokens this is causal softmax attention. Beyond, the scores of the first tokens are those of a
query at position W - 1 (section 3.2). Token t is kept in slot 1 + t, and tokens beyond the last slot overwrite the oldest ones that are not
among the first g. Slot 0 takes padding and stays 0. A token costs O(W) however long the past is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import State
from models.attention.layers.grouped_heads import GroupedHeads
from models.attention.layers.mechanism import Cost, Examples
from models.attention.layers.multi_head import merge_heads
from models.attention.sparse.sliding_window import lengths_of
from models.parts.checks import at_least
from models.parts.positions import Rotation, rotate

PADDING = 1  # number of slots for padding, before all others


class WindowCall(NamedTuple):
    """The queries of N tokens and all S + N keys that they may see: those in the S slots, then those of the tokens themselves."""

    q: Tensor  # (B, H, N, D_k)
    q_first: Tensor  # (B, H, N, D_k), the queries for the keys of the first tokens
    keys: Tensor  # (B, H_k, S + N, D_k), rotated
    values: Tensor  # (B, H_k, S + N, D_k)
    t: Tensor  # (B, N), the positions of the tokens
    seen: Tensor  # bool (B, N, S + N)
    is_first: Tensor  # bool (B, S + N)


class SinkWindowAttention(GroupedHeads):
    """Multi-head attention to a window and the first tokens, with the options of `GroupedHeads`. window is W, n_first is g. Raises
    ValueError unless 1 <= g < W and piece >= 1.

    Its state is k and v, (H_k, S, D_k) each with S = W + piece slots, after rotation, and n, the number of tokens. With `counted` False the
    state has no n, and every call needs a rotation with positions (`Rotation.t`). After a call of at most `piece` tokens the slots still
    have all that its first token sees, so a server may update them in place, and make the call again.
    """

    capabilities = Capabilities(causal=True, cross=False, state="constant", rotates=True, weights="pattern")
    cost = Cost("O(N w D)", lambda N, s: 2 * N * s.window * s.D)
    examples = Examples({"window": 6, "n_first": 2, "piece": 4}, {"window": 128, "n_first": 4, "piece": 128}, {"window": 5, "n_first": 1})
    holds = (("n", "count"),)
    slots = ("k", "v")

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        window: int = 1024,
        n_first: int = 4,
        piece: int = 256,
        counted: bool = True,
        n_kv_heads: int | None = None,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        grouped: dict[str, Any] = {"n_kv_heads": n_kv_heads, "out_bias": out_bias, "qk_norm": qk_norm, "norm_eps": norm_eps}
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias, **grouped)
        self.n_first = at_least("n_first", n_first, 1, "without first tokens it is a sliding window")
        self.window = at_least("window", window, n_first + 1, "the window has the first tokens and the token itself")
        self.piece = at_least("piece", piece, 1, "a call has tokens")
        self.counted = counted

    @property
    def n_slots(self) -> int:
        """S: enough that the tokens of a call do not overwrite those that its first token sees."""
        return self.window + self.piece

    @property
    def n_around(self) -> int:
        """The number of slots that are written again and again."""
        return self.n_slots - PADDING - self.n_first

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        kept = (self.n_kv_heads, self.n_slots, self.d_head)
        return {"k": kept, "v": kept} | ({"n": (1,)} if self.counted else {})

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        heads = self.heads(x)
        if torch.compiler.is_exporting() or x.shape[1] <= self.n_slots:
            o, state = self._attend(heads, mask, state, rotation)
        else:
            outputs = []  # of S tokens at a time, so that the cost does not grow with N²
            for begin in range(0, x.shape[1], self.n_slots):
                part = slice(begin, begin + self.n_slots)
                of_part = None if rotation is None else _part_of(rotation, part)
                mask_of_part = None if mask is None else mask[:, part]
                o, state = self._attend([head[:, :, part] for head in heads], mask_of_part, state, of_part)
                outputs.append(o)
            o = torch.cat(outputs, dim=2)
        return self.to_out(merge_heads(o).to(x.dtype)), state

    def _attend(self, heads: Sequence[Tensor], mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        """Attend from q (B, H, N, D_k) to k and v (B, H_k, N, D_k) and to the state: o (B, H, N, D_k) and the next state."""
        call = self.call(heads, state, rotation)
        keys, values = self.for_every_head(call.keys), self.for_every_head(call.values)
        o = attend_with_first(call.q, call.q_first, keys, values, seen=call.seen, is_first=call.is_first)
        return o, self.kept(call, mask, state)

    def call(self, heads: Sequence[Tensor], state: State, rotation: Rotation | None) -> "WindowCall":
        """Rotate q (B, H, N, D_k), k and v (B, H_k, N, D_k), and find the keys of the state and of the call that the queries see."""
        q, k, v = heads
        q_first = q
        if rotation is not None:
            q, k, q_first = rotate(q, rotation), rotate(k, rotation), rotate(q, rotation.within(self.window))
        t = self.positions(state, rotation, q.shape[2])
        held = torch.cat([self.held(t[:, :1] - 1), t], dim=1)
        keys, values = (torch.cat([past, new], dim=2) for past, new in ((state["k"], k), (state["v"], v)))
        return WindowCall(q, q_first, keys, values, t, self.seen(t, held), held < self.n_first)

    def kept(self, call: "WindowCall", mask: Tensor | None, state: State) -> State:
        """Return the state after a call: its tokens in their slots."""
        t, S = call.t, state["k"].shape[2]
        lengths = lengths_of(t, mask)
        # Of the tokens for one slot, only the newest is written.
        written = (t < self.n_first) | (t >= t[:, :1] + lengths.long() - self.n_around)
        written = written if mask is None else written & mask
        slots, is_written = self.slots_of(t, written), written[:, None, :, None]
        new = {name: write(state[name], slots, heads[:, :, S:] * is_written) for name, heads in (("k", call.keys), ("v", call.values))}
        if self.counted:
            new["n"] = state["n"] + lengths
        return new

    def positions(self, state: State, rotation: Rotation | None, N: int) -> Tensor:
        """Return the positions (B, N) int64 of the tokens of a call: those of the rotation, or those after the counted ones."""
        if rotation is not None and rotation.t is not None:
            return rotation.t
        if not self.counted:
            raise ValueError("counted=False, so the layer needs positions; give a rotation with `t`")
        return state["n"].long() + torch.arange(N, device=state["n"].device)

    def slots_of(self, t: Tensor, mask: Tensor) -> Tensor:
        """Return the slots (B, N) of tokens at positions t (B, N). Padding has slot 0."""
        g = self.n_first
        return (PADDING + torch.where(t < g, t, g + (t - g) % self.n_around)) * mask

    def held(self, last: Tensor) -> Tensor:
        """Return the position of the token in each slot after the token at position `last` (B, 1): (B, S), or -1 for an empty slot."""
        g = self.n_first
        first = torch.arange(self.n_slots, device=last.device) - PADDING  # the position of the first token of each slot
        newest = last - (last - first) % self.n_around
        held = torch.where(first < g, first, newest)
        return torch.where((held <= last) & (held >= first), held, -1)

    def seen(self, t: Tensor, held: Tensor) -> Tensor:
        """Return which keys at positions `held` (B, K) a token at position t (B, N) attends to: bool (B, N, K)."""
        t, held = t.unsqueeze(-1), held.unsqueeze(1)
        return (held >= 0) & (held <= t) & ((held < self.n_first) | (t - held < self.window - self.n_first))


def _part_of(rotation: Rotation, part: slice) -> Rotation:
    t, near = rotation.t, rotation.near
    cos, sin = rotation.cos[..., part, :], rotation.sin[..., part, :]
    parts = None if near is None else {window: _part_of(each, part) for window, each in near.items()}
    return Rotation(cos, sin, None if t is None else t[:, part], parts)


def write(kept: Tensor, slots: Tensor, new: Tensor) -> Tensor:
    """Return `kept` (B, H_k, S, D_k) with the tokens `new` (B, H_k, N, D_k) in the slots (B, N)."""
    at = slots[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
    return kept.scatter(2, at, new)


def attend_with_first(q: Tensor, q_first: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, is_first: Tensor) -> Tensor:
    """Attend to K keys, to those of the first tokens with other queries: q, q_first (B, H, N, D_k), k, v (B, H, K, D_k) -> (B, H, N, D_k).

    seen (B, N, K) bool: whether a query sees a key. A query that sees none has the output 0. is_first (B, K) bool: a first token's key.
    """
    scores = torch.where(is_first[:, None, None], q_first @ k.mT, q @ k.mT) * q.shape[-1] ** -0.5  # (B, H, N, K)
    p = torch.softmax(scores.masked_fill(~seen.unsqueeze(1), torch.finfo(scores.dtype).min), dim=-1)
    return (p * seen.any(-1)[:, None, :, None]) @ v
