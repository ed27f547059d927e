"""onnxruntime computes what torch computes, in the compact graph of hybrid attention."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.graphs.hybrid import CompactHybrid, is_compact
from export.graphs.token_packing import TokenPacking
from models.attention.linear.hybrid import HybridAttention
from tests.export.modules import SAME, onnx_of

D, H, C = 16, 2, 4
SCALES: dict[str, float] = {"normal": 1, "small": 0.1, "large": 30}  # large: most features of most keys are below the smallest float32
SIZES = [(1, 1), (1, 2), (2, 7), (2, 2 * C), (3, 2 * C + 1), (3, 3 * C), (2, 5 * C + 3), (3, 64), (2, 65)]


class Packed(nn.Module):
    """The compact graph in the place of the layer; what it gives at padding is not compared."""

    def __init__(self, layer: HybridAttention) -> None:
        super().__init__()
        self.attention = CompactHybrid(layer)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        packing = TokenPacking.of(mask, torch.arange(x.shape[1]))
        return packing.unpack(self.attention(packing.pack(x), packing))


def hybrid() -> HybridAttention:
    layer = HybridAttention(D, H, block=C)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def inputs(name: str, B: int, N: int) -> Tensor:
    return SCALES[name] * torch.randn(B, N, D)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCALES)
def test_onnxruntime_equals_torch_at_every_size(name: str, tmp_path: Path) -> None:
    """Any number of tokens; where there is more than one row, one in which nothing is there."""
    torch.manual_seed(0)
    module = hybrid().eval()
    example = {"x": inputs(name, 3, 7), "mask": torch.ones(3, 7, dtype=torch.bool)}
    session = onnx_of(Packed(module), example, tmp_path / "module.onnx", most_tokens=70)
    for B, N in SIZES:
        x, mask = inputs(name, B, N), torch.arange(N) < torch.tensor([N, 0, (N + 1) // 2])[:B, None]
        with torch.no_grad():
            expected = module(x, mask).numpy()
        (y,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
        assert np.isfinite(y).all(), (B, N)
        assert y.shape == expected.shape, (B, N)
        assert np.abs(y - expected)[mask.numpy()].max() <= SAME * max(1, np.abs(expected).max()), (B, N)


def test_other_forms_of_hybrid_attention_keep_their_own_graph() -> None:
    """Maps without a logarithm, no near tokens, and float16, whose range is too small."""
    assert is_compact(HybridAttention(D, H, block=C))
    assert not is_compact(HybridAttention(D, H, block=0))
    assert not is_compact(HybridAttention(D, H, block=C, feature_map="elu"))
    assert not is_compact(HybridAttention(D, H, block=C).half())
