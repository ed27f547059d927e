"""onnxruntime computes what torch computes, for mechanisms that are not in LAYERS: modality fusion and the block with fused projections."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from export.graphs.torch_graph import OPSET, quiet
from models.attention.layers.fused_block import FusedBlock
from models.attention.layers.fusion import ModalityFusion

D, H = 16, 2
SAME = 1e-4  # float32 on both sides, sums in another order
EXAMPLE = (3, 7)  # B, N with which a graph is traced; sizes of 1 would be taken for constants
SIZES = [(1, 1), (2, 2), (3, 64), (2, 65)]
MODULES = {
    "modality fusion": lambda: ModalityFusion(D, 8),
    "fused block": lambda: FusedBlock(D, H),
    "fused block, one wide head": lambda: FusedBlock(D, 1, d_head=D),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODULES)
def test_onnxruntime_equals_torch_at_every_size(name: str, tmp_path: Path) -> None:
    """Any number of tokens or modalities; where there is more than one row, one in which nothing is there."""
    torch.manual_seed(0)
    layer = MODULES[name]().eval()
    session = onnx_of(layer, tmp_path / "layer.onnx")
    for B, N in SIZES:
        x, mask = torch.randn(B, N, D), torch.arange(N) < torch.tensor([N, 0, (N + 1) // 2])[:B, None]
        with torch.no_grad():
            expected = layer(x, mask).numpy()
        (y,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
        assert y.shape == expected.shape
        assert np.abs(y - expected).max() <= SAME, (B, N)


def onnx_of(layer: nn.Module, file: Path) -> ort.InferenceSession:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x, mask)

    B, N = EXAMPLE
    axes = {0: torch.export.Dim("B"), 1: torch.export.Dim("N", max=100)}
    with quiet():
        torch.onnx.export(
            Masked(),
            (torch.randn(B, N, D), torch.ones(B, N, dtype=torch.bool)),
            file,
            dynamo=True,
            dynamic_shapes=(axes, axes),
            input_names=["x", "mask"],
            output_names=["y"],
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    return ort.InferenceSession(file, providers=["CPUExecutionProvider"])
