"""The compact graph of hybrid attention computes what the layer computes in torch."""

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from export.graphs.hybrid import CompactHybrid, is_compact
from export.graphs.token_packing import TokenPacking
from export.graphs.torch_graph import OPSET, quiet
from models.attention.linear.hybrid import HybridAttention

D, H, C = 16, 2, 4
SAME = 2e-5  # float32 on both sides, sums in another order
SIZES = [(1, 1), (1, 2), (2, 7), (2, 2 * C), (3, 2 * C + 1), (3, 3 * C), (2, 5 * C + 3), (1, 64)]


class Packed(nn.Module):
    def __init__(self, layer: HybridAttention) -> None:
        super().__init__()
        self.attention = CompactHybrid(layer)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        packing = TokenPacking.of(mask, torch.arange(x.shape[1]))
        return packing.unpack(self.attention(packing.pack(x), packing))


@pytest.fixture(scope="module")
def layer() -> HybridAttention:
    torch.manual_seed(0)
    layer = HybridAttention(D, H, block=C).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.fixture(scope="module")
def session(layer: HybridAttention, tmp_path_factory: pytest.TempPathFactory) -> ort.InferenceSession:
    file = tmp_path_factory.mktemp("hybrid") / "layer.onnx"
    axes = {0: torch.export.Dim("B"), 1: torch.export.Dim("N", max=100)}
    with quiet():
        torch.onnx.export(
            Packed(layer),
            (torch.randn(3, 19, D), torch.ones(3, 19, dtype=torch.bool)),
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


@pytest.mark.exhaustive  # kinds/test_short_graph.py exports an encoder with it
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_it_equals_the_layer_at_every_size(size: float, layer: HybridAttention, session: ort.InferenceSession) -> None:
    """Texts of different lengths, one without tokens. With large inputs, most features of most keys are below the smallest float32."""
    torch.manual_seed(1)
    for B, N in SIZES:
        x, mask = size * torch.randn(B, N, D), torch.arange(N) < torch.tensor([N, 0, N // 2 + 1])[:B, None]
        with torch.no_grad():
            expected = layer(x, mask).numpy()
        (y,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
        assert np.isfinite(y).all(), (B, N)
        assert np.abs(y - expected)[mask.numpy()].max() <= SAME * max(1, np.abs(expected).max()), (B, N)


def test_other_forms_keep_their_own_graph() -> None:
    """Maps without a logarithm, no near tokens, and float16, whose range is too small."""
    assert is_compact(HybridAttention(D, H, block=C))
    assert not is_compact(HybridAttention(D, H, block=0))
    assert not is_compact(HybridAttention(D, H, block=C, feature_map="elu"))
    assert not is_compact(HybridAttention(D, H, block=C).half())
