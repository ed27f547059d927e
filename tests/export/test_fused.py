"""onnxruntime computes what torch computes, for mechanisms that are not in LAYERS: modality fusion and the block with fused projections."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from models.attention.fused_block import FusedBlock
from models.attention.fusion import ModalityFusion
from tests.export.test_layers import SAME, D, H, onnx_of

SIZES = [(1, 1), (2, 2), (3, 64), (2, 65)]
MODULES = {
    "modality fusion": lambda: ModalityFusion(D, 8),
    "fused block": lambda: FusedBlock(D, H),
    "fused block, one wide head": lambda: FusedBlock(D, 1, d_head=D),
}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_onnxruntime_equals_torch_at_every_size(module: type[nn.Module], tmp_path: Path) -> None:
    """Any number of tokens or modalities; where there is more than one row, one in which nothing is there."""
    torch.manual_seed(0)
    layer = module().eval()
    session = onnx_of(layer, tmp_path / "layer.onnx")
    for B, N in SIZES:
        x, mask = torch.randn(B, N, D), torch.arange(N) < torch.tensor([N, 0, (N + 1) // 2])[:B, None]
        with torch.no_grad():
            expected = layer(x, mask).numpy()
        (y,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
        assert y.shape == expected.shape
        assert np.abs(y - expected).max() <= SAME, (B, N)
