"""Cross attention: queries from one sequence, keys and values from another of its own width."""

import torch
from torch import nn

from models.attention.layers.cross import CrossAttention

EXACT = 1e-10  # float64: the same formula, summed in another order


def make(d_memory: int) -> CrossAttention:
    torch.manual_seed(0)
    layer = CrossAttention(12, 3, d_memory=d_memory)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.double()


def test_equals_torch_multihead_attention() -> None:
    layer = make(d_memory=7)
    reference = nn.MultiheadAttention(12, 3, kdim=7, vdim=7, batch_first=True).double()
    with torch.no_grad():
        reference.q_proj_weight.copy_(layer.to_q.weight)
        reference.k_proj_weight.copy_(layer.to_k.weight)
        reference.v_proj_weight.copy_(layer.to_v.weight)
        reference.in_proj_bias.copy_(torch.cat([layer.to_q.bias, layer.to_k.bias, layer.to_v.bias]))
        reference.out_proj.load_state_dict(layer.to_out.state_dict())
    x, memory = torch.randn(2, 4, 12).double(), torch.randn(2, 6, 7).double()
    mask = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    expected, _ = reference(x, memory, memory, key_padding_mask=~mask)
    assert (layer(x, memory, mask) - expected).abs().max() <= EXACT
