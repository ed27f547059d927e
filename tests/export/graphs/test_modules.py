"""onnxruntime computes what torch computes, for what is not in LAYERS: modality fusion, the block with fused projections, GAU-α, and the
compact graph of hybrid attention.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.graphs.hybrid import CompactHybrid, is_compact
from export.graphs.token_packing import TokenPacking
from models.attention.layers.fused_block import FusedBlock
from models.attention.layers.fusion import ModalityFusion
from models.attention.linear.hybrid import HybridAttention
from tests.export.modules import SAME, onnx_of
from tests.models.encoder.test_gau_alpha import ids, tiny

D, H, C = 16, 2, 4
SIZES = [(1, 1), (1, 2), (2, 7), (2, 2 * C), (3, 2 * C + 1), (3, 3 * C), (2, 5 * C + 3), (3, 64), (2, 65)]


class Masked(nn.Module):
    """With the mask as the second input, whatever the layer calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x, mask)


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


def normal(B: int, N: int) -> Tensor:
    return torch.randn(B, N, D)


MODULES: dict[str, tuple[Callable[[], nn.Module], type, Callable[[int, int], Tensor]]] = {
    "modality fusion": (lambda: ModalityFusion(D, 8), Masked, normal),
    "fused block": (lambda: FusedBlock(D, H), Masked, normal),
    "fused block, one wide head": (lambda: FusedBlock(D, 1, d_head=D), Masked, normal),
    "GAU-α": (lambda: tiny(torch.float32), Masked, ids),
    "hybrid": (hybrid, Packed, normal),
    "hybrid, small inputs": (hybrid, Packed, lambda B, N: 0.1 * normal(B, N)),
    # Most features of most keys are below the smallest float32.
    "hybrid, large inputs": (hybrid, Packed, lambda B, N: 30 * normal(B, N)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODULES)
def test_onnxruntime_equals_torch_at_every_size(name: str, tmp_path: Path) -> None:
    """Any number of tokens or modalities; where there is more than one row, one in which nothing is there."""
    torch.manual_seed(0)
    make, form, inputs = MODULES[name]
    module = make().eval()
    example = {"x": inputs(3, 7), "mask": torch.ones(3, 7, dtype=torch.bool)}
    session = onnx_of(form(module), example, tmp_path / "module.onnx", most_tokens=70)
    for B, N in SIZES:
        x, mask = inputs(B, N), torch.arange(N) < torch.tensor([N, 0, (N + 1) // 2])[:B, None]
        with torch.no_grad():
            expected = module(x, mask).numpy()
        (y,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
        assert np.isfinite(y).all(), (B, N)
        assert y.shape == expected.shape, (B, N)
        seen = mask.numpy() if y.shape[:2] == mask.shape else slice(None)
        assert np.abs(y - expected)[seen].max() <= SAME * max(1, np.abs(expected).max()), (B, N)


def test_other_forms_of_hybrid_attention_keep_their_own_graph() -> None:
    """Maps without a logarithm, no near tokens, and float16, whose range is too small."""
    assert is_compact(HybridAttention(D, H, block=C))
    assert not is_compact(HybridAttention(D, H, block=0))
    assert not is_compact(HybridAttention(D, H, block=C, feature_map="elu"))
    assert not is_compact(HybridAttention(D, H, block=C).half())
