"""Attention to a window and the first tokens as few operators of ONNX Runtime, with the same bits for any cut, batch and number of slots.

In onnxruntime's CPU provider, a product of matrices gives a row the same bits in any matrix of at least two rows, on any number of
threads, as long as at most 256 products are added up. So a head of keys is multiplied by at least two queries, and values are added up in
blocks of 64 slots, then over the blocks. Slots that are not seen contribute zeros, which change no sum.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from export import contract
from export.graphs.compact import joined, one, operator
from models.attention.layers.causal import State, with_ones
from models.attention.linear.causal_hybrid import LEAST, CausalHybridAttention, ExponentMap
from models.attention.sparse.sink_window import PADDING, SinkWindowAttention
from models.parts.positions import Rotation

BLOCK = contract.SLOT_BLOCK


class CallSlots:
    """What all layers of a call share: where tokens are written, which slots they see, and which tokens leave the window. Computed by the
    first layer that needs it."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}
        self._left: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}
        self._t: list[Tensor] = []  # kept, so that no other tensor has the same id

    def of(self, layer: SinkWindowAttention, t: Tensor, mask: Tensor, n_slots: Any, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices (B, N, H_k, 3) of the tokens in k and v (B, H_k, S, D_k), the mask as 1 and 0 (B, N, 1), and the bias
        (B, 1, rows N, S) of the scores: 0 where a slot is seen, else the least number. `rows` are the queries of a token for each key head.
        """
        key = (id(t), layer.n_slots, layer.window, layer.n_first, layer.n_kv_heads, rows)
        if key not in self._made:
            B, N = t.shape
            places = _places(layer.slots_of(t, mask), layer.n_kv_heads)
            bias = torch.where(_seen(layer, t, n_slots), 0.0, torch.finfo(torch.float32).min)
            bias = bias.unsqueeze(2).expand(B, N, rows, n_slots).reshape(B, 1, N * rows, n_slots)
            self._made[key] = places, mask.unsqueeze(-1).float(), bias
            self._t.append(t)
        return self._made[key]

    def left(self, layer: CausalHybridAttention, t: Tensor, mask: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for the tokens that leave the window at tokens t (B, N): their indices (B, N, H_k, 3), 1 and 0 (B, N, 1, 1) for those
        that the far sums take, and the bias (B, 1, rows N, 1) of their score: 0 where a token has far ones, else the least number.
        """
        key = (id(t), layer.n_slots, layer.window, layer.n_first, layer.n_kv_heads, rows)
        if key not in self._left:
            B, N = t.shape
            left = t - layer.n_near
            is_far = left >= layer.n_first
            bias = torch.where(is_far, 0.0, torch.finfo(torch.float32).min).unsqueeze(2).expand(B, N, rows).reshape(B, 1, N * rows, 1)
            taken = (is_far & mask).float()[:, :, None, None]
            self._left[key] = _places(layer.slots_of(left.clamp_min(0), is_far), layer.n_kv_heads), taken, bias
            self._t.append(t)
        return self._left[key]


def _places(slots: Tensor, H_k: int) -> Tensor:
    """Return the indices of slots (B, N) in tensors (B, H_k, S, ..): (B, N, H_k, 3)."""
    B, N = slots.shape
    row, head = torch.arange(B)[:, None, None].expand(B, N, H_k), torch.arange(H_k).expand(B, N, H_k)
    return torch.stack([row, head, slots[:, :, None].expand(B, N, H_k)], dim=-1)


def sink_window_layer(layer: SinkWindowAttention, shared: CallSlots) -> Callable[..., tuple[Tensor, State]]:
    """Return a form of `SinkWindowAttention.advance` for the export, for calls of at most `piece` tokens with positions."""
    H, H_k, D = layer.n_heads, layer.n_kv_heads, layer.d_head
    group = H // H_k
    rows = max(group, 2)  # queries of a token for each key head; a product of one row would have other bits
    weight, bias = joined([layer.to_q, layer.to_k, layer.to_v])
    first = PADDING + layer.n_first
    scale = D**-0.5
    norms = (layer.q_norm, layer.k_norm)
    far = _far_sums(layer, shared, rows) if isinstance(layer, CausalHybridAttention) else None

    def advance(x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        assert mask is not None
        (B, N), S = x.shape[:2], state["k"].shape[2]
        qk, v = nn.functional.linear(x, weight, bias).float().split([(H + H_k) * D, H_k * D], dim=-1)
        if norms[0] is not None and norms[1] is not None:
            q, k = qk.split([H * D, H_k * D], dim=-1)
            qk = torch.cat([_normed(q, norms[0]), _normed(k, norms[1])], dim=-1)
        q_plain = qk[..., : H * D]
        q_first = q_plain if rotation is None else _rotated(q_plain, rotation.within(layer.window), H)
        qk = qk if rotation is None else _rotated(qk, rotation, H + H_k)
        q, k = qk.split([H * D, H_k * D], dim=-1)
        t = layer.positions(state, rotation, N)
        places, tokens, seen = shared.of(layer, t, mask, S, rows)
        new = {
            name: one("ScatterND", [state[name], places, (heads * tokens).unflatten(-1, (H_k, D))], state[name].shape)
            for name, heads in (("k", k), ("v", v))
        }
        keys, values = new["k"].float(), new["v"].float()
        scores = one("FusedMatMul", [_rows(q), keys], (B, H_k, N * rows, S), transB=1, alpha=scale)
        nearer = one("FusedMatMul", [_rows(q_first), keys[:, :, :first]], (B, H_k, N * rows, first), transB=1, alpha=scale)
        scores = torch.cat([nearer, scores[..., first:]], dim=-1) + seen
        if far is None:
            p = torch.softmax(scores, dim=-1)
        else:
            sums, log_scale, new["S"], no_far = far(q_plain, new, state["S"], t, mask, rotation)
            p = torch.softmax(torch.cat([scores, _grouped(log_scale) + no_far], dim=-1), dim=-1)
            p, share = p[..., :-1], p[..., -1:]
        blocks = _shaped(p, [0, 0, 0, -1, BLOCK], (B, H_k, N * rows, S // BLOCK, BLOCK)).transpose(2, 3)
        o = blocks @ _shaped(values, [0, 0, -1, BLOCK, D], (B, H_k, S // BLOCK, BLOCK, D))  # (B, H_k, blocks, N rows, D)
        o = _tokens_first(o.sum(2), D)
        if far is not None:
            weights = torch.cat([blocks.sum(-1).sum(2).unsqueeze(-1), share], dim=-1)
            near_weight, share = _tokens_first(weights, 2).split(1, dim=-1)
            o = (o + share * sums[..., :-1]) / (near_weight + share * sums[..., -1:] + LEAST)
        o = _shaped(o, [0, 0, H * D], (B, N, H * D))
        if layer.counted:
            new["n"] = state["n"] + mask.sum(1, keepdim=True, dtype=state["n"].dtype)
        return layer.to_out(o.to(x.dtype)), {name: new[name] for name in state}

    def _rows(q: Tensor) -> Tensor:
        """Group the queries by their key head: (B, N, H D) -> (B, H_k, N rows, D)."""
        B, N = q.shape[:2]
        q = _shaped(q, [0, 0, H_k, group, D], (B, N, H_k, group, D))
        if rows > group:
            q = torch.cat([q, q], dim=3)
        return _shaped(q.transpose(1, 2), [0, 0, -1, D], (B, H_k, N * rows, D))

    def _grouped(x: Tensor) -> Tensor:
        """Group numbers of the heads as `_rows` does: (B, H, N, 1) -> (B, H_k, N rows, 1)."""
        B, _, N, _ = x.shape
        x = _shaped(x, [0, H_k, group, -1], (B, H_k, group, N))
        if rows > group:
            x = torch.cat([x, x], dim=2)
        return _shaped(x.transpose(2, 3), [0, 0, -1, 1], (B, H_k, N * rows, 1))

    def _tokens_first(x: Tensor, width: int) -> Tensor:
        """Undo the grouping of `_rows`: (B, H_k, N rows, width) -> (B, N, H, width)."""
        B, N = x.shape[0], x.shape[2] // rows
        x = _shaped(x, [0, 0, -1, rows, width], (B, H_k, N, rows, width))[:, :, :, :group]
        return _shaped(x.permute(0, 2, 1, 3, 4), [0, 0, H, width], (B, N, H, width))

    return advance


Far = Callable[[Tensor, State, Tensor, Tensor, Tensor, Rotation | None], tuple[Tensor, Tensor, Tensor, Tensor]]


def _far_sums(layer: CausalHybridAttention, shared: CallSlots, rows: int) -> Far:
    """Return a function that computes the far part of `CausalHybridAttention`."""
    H, H_k, D, F = layer.n_heads, layer.n_kv_heads, layer.d_head, layer.n_features
    maps = {phi: ((phi.weight.detach() * phi.scale).mT.contiguous(), phi.bias.detach()) for phi in (layer.phi_q, layer.phi_k)}

    def far(q: Tensor, kept: State, S: Tensor, t: Tensor, mask: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the far sums (B, N, H, D + 1) divided by exp(log_scale), log_scale (B, H, N, 1), the new S, and the bias of the scores.

        q (B, N, H D), before rotation. kept: the slots after this call, which still have the tokens that leave the window.
        """
        B, N = q.shape[:2]
        places, taken, bias = shared.left(layer, t, mask, rows)
        k, v = (one("GatherND", [kept[name].float(), places], (B, N, H_k, D)) for name in ("k", "v"))
        if rotation is not None:
            flat = _shaped(k, [0, 0, H_k * D], (B, N, H_k * D))
            k = _shaped(_rotated(flat, rotation._replace(sin=-rotation.sin), H_k), [0, 0, H_k, D], (B, N, H_k, D))
        log_q = _exponents(layer.phi_q, _shaped(q, [0, 0, H, D], (B, N, H, D)))
        log_k = _exponents(layer.phi_k, k).transpose(1, 2)
        m = log_q.amax(-1, keepdim=True)
        phi_q = _shaped((log_q - m).exp().transpose(1, 2), [0, 0, H * F], (B, N, H * F))
        phi_k = _shaped(log_k.softmax(-1) * taken, [0, 0, H_k * F], (B, N, H_k * F))
        v = _shaped(with_ones(v), [0, 0, H_k * (D + 1)], (B, N, H_k * (D + 1)))
        attributes = {"q_num_heads": H, "kv_num_heads": H_k, "scale": 1.0, "update_rule": "linear"}
        o, S = operator("LinearAttention", [phi_q, phi_k, v, S], [(B, N, H * (D + 1)), S.shape], **attributes)
        return _shaped(o, [0, 0, H, D + 1], (B, N, H, D + 1)), m, S, bias

    def _exponents(phi: ExponentMap, x: Tensor) -> Tensor:
        """Compute log φ(x): (B, N, H, D) -> (B, H, N, F). Rows are doubled, as a product of one row would have other bits."""
        weight, bias = maps[phi]
        N = x.shape[1]
        y = torch.cat([x, x], dim=1).transpose(1, 2) @ weight + bias  # (B, H, 2 N, F)
        return y[:, :, :N]

    return far


def _seen(layer: SinkWindowAttention, t: Tensor, n_slots: Any) -> Tensor:
    """Return whether a token at position t (B, N) attends to the token in a slot: bool (B, N, n_slots), where slots already have the tokens
    of this call. A slot that was never written is not seen."""
    g, t, first = layer.n_first, t.unsqueeze(-1), torch.arange(n_slots) - PADDING  # the position of the first token of each slot
    age = (t - first) % layer.n_around  # tokens since the newest one, at or before t, that the slot can have
    recent = (first >= g) & (age < layer.window - g) & (t - age >= g)
    return recent | ((first >= 0) & (first < g) & (first <= t))


def _rotated(x: Tensor, rotation: Rotation, n_heads: int) -> Tensor:
    """Rotate the heads of x (B, N, H D)."""
    cos, sin = rotation.cos.squeeze(1), rotation.sin.squeeze(1)
    return one("RotaryEmbedding", [x, cos, sin], x.shape, num_heads=n_heads, rotary_embedding_dim=2 * cos.shape[-1])


def _normed(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    scale = norm.weight.detach().float()
    return one("BranchwiseRMSNorm", [x, scale], x.shape, num_branches=x.shape[-1] // norm.weight.numel(), epsilon=norm.eps)


def _shaped(x: Tensor, sizes: list[int], shape: Any) -> Tensor:
    """Reshape x; in `sizes`, 0 keeps an axis. The shape is a constant, which costs a call nothing."""
    return one("Reshape", [x, torch.tensor(sizes)], shape)
