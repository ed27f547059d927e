"""Exports one attention layer as an ONNX graph from x (B, N, D) and mask (B, N) to y (B, N, D). B and N are dynamic.

A causal layer starts without a past. Its final state is another output of the graph, because the exporter would otherwise drop the
operators that compute the state.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from export.comparison.plan import EXAMPLE
from export.graphs.decoder_operators import FORMS, with_operators
from export.graphs.decoder_step import OPSET as CAUSAL_OPSET
from export.graphs.torch_graph import OPSET, quiet, strip


class SingleLayer(nn.Module):
    """A wrapper that gives all layers one interface: x (B, N, D), bool mask (B, N) -> y (B, N, D) and the tensors of the state, if any."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        if not self.layer.capabilities.causal:
            return (self.layer(x, mask),)
        y, state = self.layer(x, mask)
        return y, *state.values()


def write(layer: Any, file: Path, *, d_model: int, longest: int) -> None:
    """Write the layer's graph, for N up to `longest`. The layer is unchanged."""
    causal = layer.capabilities.causal
    names = ["y", *(f"state_{name}" for name in layer.state_shapes)] if causal else ["y"]
    axes = {0: torch.export.Dim("B"), 1: torch.export.Dim("N", max=longest)}
    B, N = EXAMPLE
    with quiet(), with_operators(layer):
        torch.onnx.export(
            SingleLayer(layer),
            (torch.randn(B, N, d_model), torch.ones(B, N, dtype=torch.bool)),
            file,
            dynamo=True,
            dynamic_shapes=(axes, axes),
            input_names=["x", "mask"],
            output_names=names,
            opset_version=CAUSAL_OPSET if causal else OPSET,
            custom_translation_table=FORMS if causal else None,
            external_data=False,
            verbose=False,
        )
    strip(file)


def operators(file: Path) -> dict[str, int]:
    """Count the operators of the graph by type, also those inside its functions and loops. The most frequent type is first."""
    model = onnx.load(file, load_external_data=False)
    counts: Counter[str] = Counter()
    waiting = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        counts[node.op_type] += 1
        waiting += [inner for attribute in node.attribute for inner in attribute.g.node]
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
