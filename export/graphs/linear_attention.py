"""Causal linear attention as few operators of ONNX Runtime, which take tokens in the layout (B, N, D): nothing is transposed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from export.graphs.compact import joined, operator
from models.attention.layers.causal import State
from models.attention.linear.causal_linear import CausalLinearAttention
from models.attention.linear.feature_maps import map_named
from models.parts.positions import Rotation

_EPS = 1e-6  # added to the divisor, as in `attend_causal_features`
_BY_NUMBER = ("elu", "relu", "relu_squared", "exp")  # the feature maps that map each number on its own


def linear_layer(layer: CausalLinearAttention) -> Callable[..., tuple[Tensor, State]]:
    """Return a form of `CausalLinearAttention.advance` for the export. One product makes q, k and [v | 1]. Layers with a rotation, or with
    a feature map of whole heads, keep their own form.
    """
    if layer.feature_map not in _BY_NUMBER:
        return layer.advance
    H, D_k, width = layer.n_heads, layer.d_head, layer.n_heads * layer.d_head
    phi = _elu_plus_one if layer.feature_map == "elu" else map_named(layer.feature_map)
    weight, bias = joined([layer.to_q, layer.to_k, _with_ones(layer.to_v, H)])
    own = layer.advance

    def advance(x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        if rotation is not None:
            return own(x, mask, state, rotation)
        assert mask is not None
        S = state["S"]
        y = nn.functional.linear(x, weight, bias).to(S.dtype)
        qk, v = y.split([2 * width, H * (D_k + 1)], dim=-1)
        phi_q, phi_k = phi(qk).split(width, dim=-1)
        phi_k = phi_k * mask.unsqueeze(-1).to(S.dtype)
        heads = {"q_num_heads": H, "kv_num_heads": H}
        o, S = operator("LinearAttention", [phi_q, phi_k, v, S], [v.shape, S.shape], scale=1.0, update_rule="linear", **heads)
        o = o.unflatten(-1, (H, D_k + 1))
        o = (o[..., :-1] / (o[..., -1:] + _EPS)).flatten(-2)
        return layer.to_out(o.to(x.dtype)), {"S": S}

    return advance


def _elu_plus_one(x: Tensor) -> Tensor:
    """Compute `feature_maps.elu_plus_one`, with the same bits, by one operator less."""
    return x.relu() + x.clamp(max=0).exp()


def _with_ones(to_v: nn.Linear, H: int) -> nn.Linear:
    """Return the projection to [v | 1] of each head: D -> H (D_k + 1)."""
    D_v, D = to_v.out_features // H, to_v.in_features
    wider = nn.Linear(D, H * (D_v + 1), device="meta")
    bias = torch.zeros_like(to_v.weight[:, 0]) if to_v.bias is None else to_v.bias.detach()
    weight = nn.functional.pad(to_v.weight.detach().view(H, D_v, D), (0, 0, 0, 1)).view(-1, D)
    wider.weight = nn.Parameter(weight)
    wider.bias = nn.Parameter(nn.functional.pad(bias.view(H, D_v), (0, 1), value=1.0).view(-1))
    return wider
