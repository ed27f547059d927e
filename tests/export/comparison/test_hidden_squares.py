"""No N² hides in a mechanism of linear cost: its largest tensor and its multiply-adds, counted at two lengths, not timed."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from export.comparison import growth
from export.comparison.mechanisms import EVERYTHING, build, is_attention, work
from models.layers import LAYERS
from tests.largest_tensor import LargestTensor

D, H = 8, 2
SHORT, LONG = 1024, 2048  # BigBird sees all blocks of shorter texts
N_MAX = LONG
LINEAR = 1.15  # an exponent up to which growth is called linear: the bar of what is measured


def stated(name: str) -> float:
    lengths = [1024 * 2**i for i in range(5)]
    exponent = growth.exponent(lengths, [work(name, N, 128, H, longest=N_MAX) for N in lengths])
    assert exponent is not None
    return exponent


LINEAR_COST = [name for name in EVERYTHING if stated(name) <= LINEAR and is_attention(name)]


def counted(layer: nn.Module, N: int) -> tuple[int, int]:
    """Bytes of the largest tensor, and multiply-adds of all products of matrices."""
    x, mask = torch.randn(1, N, D, generator=torch.Generator().manual_seed(N)), torch.ones(1, N, dtype=torch.bool)
    with torch.no_grad():
        with LargestTensor() as largest:
            layer(x, mask)
        with FlopCounterMode(display=False) as flops:
            layer(x, mask)
    return largest.size_bytes, flops.get_total_flops()


def test_linear_cost_is_stated_of_these() -> None:
    assert {"linear", "performer", "nystromformer", "vq", "local", "longformer", "bigbird", "lsh", "flash", "delta"} <= set(LINEAR_COST)
    assert not {"softmax", "gau", "synthesizer", "atrous", "sparse", "causal_lsh"} & set(LINEAR_COST)
    assert set(LINEAR_COST) <= LAYERS.keys()


@pytest.mark.parametrize("name", LINEAR_COST)
def test_neither_the_largest_tensor_nor_the_products_grow_faster_than_the_length(name: str) -> None:
    layer = build(name, D, H, longest=N_MAX)
    (short_bytes, short_flops), (long_bytes, long_flops) = counted(layer, SHORT), counted(layer, LONG)
    most = (LONG / SHORT) ** LINEAR
    assert long_bytes <= most * short_bytes, f"{short_bytes} B at N = {SHORT}, {long_bytes} B at {LONG}"
    assert long_flops <= most * short_flops


def test_a_square_is_found() -> None:
    layer = build("softmax", D, H, longest=N_MAX)
    (short_bytes, _), (long_bytes, _) = counted(layer, SHORT), counted(layer, LONG)
    assert long_bytes > 3 * short_bytes
