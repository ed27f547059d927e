"""onnxruntime computes what torch computes, for every layer of an encoder. Those of decoders: test_step_graph.py."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from export.graph import OPSET, quiet
from models import LAYERS
from tests.models.mechanisms import OPTIONS

D, H = 16, 2
LARGEST_N = 100
SAME = 1e-4  # float32 on both sides, sums in another order
EXAMPLE = (3, 7)  # B, N with which a graph is traced; sizes of 1 would be taken for constants
SIZES = [(1, 1), (1, 2), (2, 31), (3, 64), (2, 65), (1, LARGEST_N)]

SEEING_BOTH_WAYS = [name for name, layer in LAYERS.items() if not layer.capabilities.causal]


@pytest.mark.parametrize("name", SEEING_BOTH_WAYS)
def test_onnxruntime_equals_torch_at_every_size(name: str, tmp_path: Path) -> None:
    """With padding and, where there is more than one row, a row of padding only. What stands in the padding is not compared."""
    torch.manual_seed(0)
    layer = LAYERS[name](D, H, **OPTIONS.get(name, {})).eval()
    session = onnx_of(layer, tmp_path / "layer.onnx")
    for B, N in SIZES:
        x, mask = torch.randn(B, N, D), torch.arange(N) < torch.tensor([N, 0, (N + 1) // 2])[:B, None]
        with torch.no_grad():
            expected = layer(x, mask)
        (y,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
        assert np.isfinite(y).all(), (B, N)
        assert np.abs(y - expected.numpy())[mask.numpy()].max() <= SAME, (B, N)


def onnx_of(layer: nn.Module, file: Path) -> ort.InferenceSession:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x, mask)

    B, N = EXAMPLE
    axes = {0: torch.export.Dim("B"), 1: torch.export.Dim("N", max=LARGEST_N)}
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
