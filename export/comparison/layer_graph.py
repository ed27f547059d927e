"""Exports one attention layer as an ONNX graph from x (B, N, D) and mask (B, N) to y (B, N, D), and compares it with torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export import contract
from export.checks.parity import open_graph
from export.graphs.decoder_operators import FORMS, with_operators
from export.graphs.decoder_step import OPSET as CAUSAL_OPSET
from export.graphs.torch_graph import OPSET, TorchGraph

# B, N of the traced example. N is more than one chunk, block or group, because the exporter makes a count of 1 a constant.
EXAMPLE = (3, 519)
BAR = 1e-4  # largest allowed difference; both compute in float32 and sum in different orders


class SingleLayer(nn.Module):
    """A wrapper that gives all layers one interface: x (B, N, D), mask (B, N) -> y (B, N, D) and the tensors of the state, if any.

    A causal layer starts without a past. Its state is an output because the exporter would otherwise drop the operators that compute it.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        if not self.layer.capabilities.causal:
            return (self.layer(x, mask != 0),)
        y, state = self.layer(x, mask != 0)
        return y, *state.values()


def write(layer: Any, file: Path, *, d_model: int, longest: int) -> None:
    """Write the layer's graph, for N up to `longest`. The layer is unchanged."""
    causal = layer.capabilities.causal
    names = ["y", *(f"state_{name}" for name in layer.state_shapes)] if causal else ["y"]
    graph = TorchGraph(
        SingleLayer(layer),
        (contract.float32("x", "B", "N", d_model), contract.int64("mask", "B", "N")),
        tuple(contract.float32(name) for name in names),
        dict(zip("BN", EXAMPLE, strict=True)),
        longest,
        CAUSAL_OPSET if causal else OPSET,
        FORMS if causal else {},
    )
    with with_operators(layer):
        graph.export(file, weights_beside=False)


def difference(layer: Any, graph: Path, sizes: Sequence[tuple[int, int]], d_model: int) -> float:
    """Return the largest |onnxruntime - torch| of an output at all sizes (B, N), for random tokens of variance 1. The first row has N
    tokens, the second none, and half of the third is padding. Outputs at padding are not compared.
    """
    session, random, largest = open_graph(graph), np.random.default_rng(0), 0.0
    for B, N in sizes:
        x = random.standard_normal((B, N, d_model), dtype=np.float32)
        mask = np.arange(N) < np.array([N, 0, (N + 1) // 2])[:B, None]
        with torch.inference_mode():
            expected = layer(torch.from_numpy(x), torch.from_numpy(mask))
        y = expected[0] if layer.capabilities.causal else expected
        (got,) = session.run(["y"], {"x": x, "mask": mask.astype(np.int64)})
        largest = max(largest, float(np.abs(got - y.numpy())[mask].max()))
    return largest
