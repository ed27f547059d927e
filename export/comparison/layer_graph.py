"""One attention layer becomes an ONNX graph of its own: x (B, N, D) and mask (B, N) in, y (B, N, D) out, B and N free.

A causal layer is given from its first token on, and its state goes out beside y, so that no part of its work is left out.
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


class Alone(nn.Module):
    """A layer of LAYERS behind one interface: (B, N, D), bool (B, N) -> y, and the tensors of its state if it has one."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        if not self.layer.capabilities.causal:
            return (self.layer(x, mask),)
        y, state = self.layer(x, mask)
        return y, *state.values()


def write(layer: Any, file: Path, *, d_model: int, longest: int) -> None:
    """The graph for N up to `longest`. The layer is left as it was."""
    causal = layer.capabilities.causal
    names = ["y", *(f"state_{name}" for name in layer.state_shapes)] if causal else ["y"]
    axes = {0: torch.export.Dim("B"), 1: torch.export.Dim("N", max=longest)}
    B, N = EXAMPLE
    with quiet(), with_operators(layer):
        torch.onnx.export(
            Alone(layer),
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
    """The number of each operator in the graph, those of its functions and loops included; the most frequent first."""
    model = onnx.load(file, load_external_data=False)
    counts: Counter[str] = Counter()
    waiting = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        counts[node.op_type] += 1
        waiting += [inner for attribute in node.attribute for inner in attribute.g.node]
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
