"""onnxruntime computes what torch computes, for the causal layers whose state grows, for those with a running maximum at the edges of its
chunks, and for a convolution written as attention.

Those with a state of constant size: graphs/test_decoder_step.py. The layers of an encoder: test_every_attention.py.
"""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from export.comparison import layer_graph
from export.graphs.torch_graph import OPSET, quiet
from models.attention.layers.running_max import CHUNK, GROUP
from models.attention.scoring.convolution_as_attention import ConvolutionAsAttention
from models.layers import LAYERS

D, H = 16, 2
LARGEST_N = 100
SAME = 1e-4  # float32 on both sides, sums in another order
EXAMPLE = (3, 7)  # B, N with which a graph is traced; sizes of 1 would be taken for constants
SIZES = [(1, 1), (1, 2), (2, 31), (3, 64), (2, 65), (1, LARGEST_N)]

GROWING = [name for name, layer in LAYERS.items() if layer.capabilities.causal and layer.capabilities.state != "constant"]
CONVOLUTIONS = {
    "of a sequence": nn.Conv1d(3, 4, 5, padding=2, dilation=2),
    "of a picture": nn.Conv2d(2, 3, 3, padding=1, stride=(2, 1)),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_layer_and_its_state_at_every_size(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding and, where there is more than one row, a row of padding only. The output at padding is not compared, the state is."""
    monkeypatch.setattr(layer_graph, "EXAMPLE", EXAMPLE)
    torch.manual_seed(0)
    layer = LAYERS[name](D, H, **LAYERS[name].examples.small).eval()
    layer_graph.write(layer, tmp_path / "layer.onnx", d_model=D, longest=LARGEST_N)
    session = opened(tmp_path / "layer.onnx")
    assert [output.name for output in session.get_outputs()] == ["y", *(f"state_{tensor}" for tensor in layer.state_shapes)]
    for B, N in SIZES:
        x, mask = torch.randn(B, N, D), torch.arange(N) < torch.tensor([N, 0, (N + 1) // 2])[:B, None]
        with torch.no_grad():
            expected, state = layer(x, mask)
        y, *after = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
        assert np.isfinite(y).all(), (B, N)
        assert np.abs(y - expected.numpy())[mask.numpy()].max() <= SAME, (B, N)
        for tensor, got in zip(state, after, strict=True):
            assert np.abs(got - state[tensor].numpy()).max() <= SAME, (tensor, B, N)


@pytest.mark.parametrize("name", ["causal_efficient", "causal_performer"])
def test_a_running_maximum_at_every_edge_of_chunks_and_of_their_groups(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is traced with less than a chunk. Keys grow, so that every chunk has a new maximum; and they fall, so that none has."""
    monkeypatch.setattr(layer_graph, "EXAMPLE", EXAMPLE)
    torch.manual_seed(0)
    layer = LAYERS[name](D, H, **LAYERS[name].examples.small).eval()
    block = CHUNK * GROUP
    layer_graph.write(layer, tmp_path / "layer.onnx", d_model=D, longest=4 * block)
    session = opened(tmp_path / "layer.onnx")
    for N in (1, CHUNK - 1, CHUNK, CHUNK + 1, block - 1, block, block + 1, 3 * block + CHUNK + 1):
        growth = torch.linspace(0.1, 3, N)[:, None]
        x = torch.randn(3, N, D) * torch.stack([growth, growth.flip(0), growth])
        mask = torch.arange(N) < torch.tensor([N, N, (N + 1) // 2])[:, None]
        with torch.no_grad():
            expected, state = layer(x, mask)
        y, *after = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
        assert np.abs(y - expected.numpy())[mask.numpy()].max() <= SAME, N
        for tensor, got in zip(state, after, strict=True):
            assert np.abs(got - state[tensor].numpy()).max() <= SAME * max(1.0, float(state[tensor].abs().max())), (tensor, N)
        alone, *_ = session.run(None, {"x": x[2:, : (N + 1) // 2].numpy(), "mask": mask[2:, : (N + 1) // 2].numpy()})
        assert np.abs(y[2:, : (N + 1) // 2] - alone).max() <= SAME, N  # neither padding nor the other rows


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_as_attention_at_every_batch_size(kind: str, tmp_path: Path) -> None:
    """The places that a kernel sees are constants of its graph: a graph is for one size of picture, and for any number of them."""
    torch.manual_seed(0)
    convolution = CONVOLUTIONS[kind]
    layer, sizes = ConvolutionAsAttention(convolution).eval(), (9, 7)[: len(convolution.kernel_size)]
    with quiet():
        torch.onnx.export(
            layer,
            (torch.randn(3, convolution.in_channels, *sizes),),
            tmp_path / "layer.onnx",
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("B")},),
            input_names=["x"],
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    session = opened(tmp_path / "layer.onnx")
    for B in (1, 2, 5):
        x = torch.randn(B, convolution.in_channels, *sizes)
        with torch.no_grad():
            expected = layer(x)
        (y,) = session.run(None, {"x": x.numpy()})
        assert np.abs(y - expected.numpy()).max() <= SAME


def opened(file: Path) -> ort.InferenceSession:
    return ort.InferenceSession(file, providers=["CPUExecutionProvider"])
