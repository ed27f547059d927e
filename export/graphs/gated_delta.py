"""The gated delta rule as few operators of ONNX Runtime, which take tokens in the layout (B, N, D): nothing is transposed. For each layer
these are a fifth of those that torch's exporter writes, and a small model's step spends much of its time between operators.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from export.graphs.compact import joined, operator, rows_at
from models.attention.layers.causal import State
from models.attention.recurrent.gated_delta import GatedDeltaNet

_UNIT_EPS = 1e-6  # epsilon of models.attention.recurrent.delta.unit


def gated_delta_layer(layer: GatedDeltaNet) -> Callable[..., tuple[Tensor, State]]:
    """Return a form of `GatedDeltaNet.advance` for the export. Its arguments and results are the same."""
    H, H_k, D_k, widths = layer.n_heads, layer.n_key_heads, layer.d_head, layer.widths
    projections = [layer.to_q, layer.to_k, layer.to_v, layer.to_gate, layer.to_decay, layer.to_beta]
    sizes = [sum(widths), layer.to_gate.out_features, H, H]
    weight, bias = joined(projections)
    decay_scale = -layer.A_log.detach().float().exp()
    taps = layer.convolution.weight.detach().float()[:, 0].T.contiguous()  # (K, D_c)
    norm_scale, norm_eps = layer.norm.weight.detach().float(), layer.norm.eps
    assert norm_eps is not None
    unit_scale = torch.full((D_k,), D_k**-0.5)

    def advance(x: Tensor, mask: Tensor | None, state: State, rotation: object) -> tuple[Tensor, State]:
        assert mask is not None
        (B, N), past = x.shape[:2], state["conv"]
        tokens = mask.unsqueeze(-1).to(past.dtype)  # (B, N, 1)
        y = nn.functional.linear(x, weight, bias).to(past.dtype)
        qkv, gate, a, b = y.split(sizes, dim=-1)
        window = torch.cat([past, qkv], dim=1)  # (B, K - 1 + N, D_c)
        mixed = nn.functional.silu(convolve(window, taps))
        q, k, v = mixed.split(widths, dim=-1)
        # An RMS norm with these weights divides a head by its length: by sqrt(its sum of squares + the epsilon of `unit`).
        q, k = (_for_every_head(_normed(each, unit_scale, _UNIT_EPS / D_k), H, H_k) for each in (q, k))
        decay, beta = operator("LinearAttentionGate", [a, layer.dt_bias.float(), decay_scale, b], [(B, N, H), (B, N, H)])
        o, S = operator(
            "LinearAttention",
            [q, k, v, state["S"], decay * tokens, beta * tokens],  # padding neither decays the state nor writes to it
            [(B, N, widths[2]), state["S"].shape],
            q_num_heads=H,
            kv_num_heads=H,
            scale=D_k**-0.5,
            update_rule="gated_delta",
        )
        y = _normed(o, norm_scale, norm_eps) * nn.functional.silu(gate)
        return layer.to_out(y.to(x.dtype)), {"S": S, "conv": rows_at(window, mask.sum(1, keepdim=True) + torch.arange(past.shape[1]))}

    return advance


def convolve(window: Tensor, taps: Tensor) -> Tensor:
    """Convolve each channel over the tokens: window (B, K - 1 + N, D_c), taps (K, D_c) -> (B, N, D_c), faster than CausalConvWithState."""
    last = len(taps) - 1
    y = window[:, :-last] * taps[0]
    for back in range(1, last):
        y = y + window[:, back : back - last] * taps[back]
    return y + window[:, last:] * taps[last]


def _normed(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Compute the RMS norm of each head of x (B, N, H D), with weights `scale` (D,)."""
    heads = {"num_branches": x.shape[-1] // len(scale), "epsilon": eps}
    (y,) = operator("BranchwiseRMSNorm", [x, scale], [x.shape], **heads)
    return y


def _for_every_head(x: Tensor, H: int, H_k: int) -> Tensor:
    """Repeat each key head for its group of value heads, which are adjacent: (B, N, H_k D_k) -> (B, N, H D_k)."""
    if H_k == H:
        return x
    heads = x.unflatten(-1, (H_k, 1, -1))
    return heads.expand(-1, -1, -1, H // H_k, -1).flatten(2)
