"""The graph that draws a token for each row of scores, for any number of tokens. `python -m export.graphs.draw` writes it again.

The service runs it right after a step, on the core that has just computed the logits. It is a file of the service and not of a bundle,
because it has no weights and does not depend on the model.
"""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

FILE = Path(__file__).parents[2] / "service" / "generation" / "sampling" / "draw.onnx"
BLOCK = (
    64  # tokens in a block: first a block is drawn, then a token in it, since a cumulative sum over all tokens takes as long as the rest
)
_OPSET, _IR_VERSION = 18, 10


def draw_graph() -> ModelProto:
    """Return the graph that inverts the CDF of softmax(scores / temperature) at a uniform number.

    Inputs: scores (B, V), of which -inf is never drawn; inverse_temperature (B, 1); uniform (B, 1), at least 0 and below 1. Output: ids
    (B, 1), -1 where the largest score of a row is not finite. With the largest inverse temperature of float32 and uniform = 0, the id is
    that of the first maximum.

    Every operator computes a row from this row alone, in an order that depends on V alone, so a row has the same bits in any batch.
    """
    graph = _Graph()
    peaks = graph("ReduceMax", "scores", np.array([-1]), keepdims=1)  # (B, 1)
    weights = graph("Exp", graph("Mul", graph("Sub", "scores", peaks), "inverse_temperature"))  # (B, V)
    missing = graph("Mod", graph("Neg", graph("Shape", "scores", start=1, end=2)), np.array([BLOCK]))
    padded = graph("Pad", weights, graph("Concat", np.zeros(3, np.int64), missing, axis=0), np.float32(0))
    blocks = graph("Reshape", padded, np.array([0, -1, BLOCK]))  # (B, W, BLOCK)
    sums = graph.double(graph("ReduceSum", blocks, np.array([-1]), keepdims=0))  # (B, W)
    up_to, total = graph.cumulative(sums)
    target = graph.below(graph("Mul", "uniform", total), total)
    block = graph.first_above(up_to, target)  # (B, 1)
    before = graph("Sub", *(graph("GatherElements", each, block, axis=1) for each in (up_to, sums)))
    within, whole = graph.cumulative(graph.double(graph("GatherND", blocks, block, batch_dims=1)))  # (B, BLOCK)
    # A block's sum in float32 differs from that in float64, so the rest of the target may lie outside of the block.
    rest = graph.below(graph("Max", graph("Sub", target, before), np.float64(0)), whole)
    ids = graph("Add", graph("Mul", block, np.int64(BLOCK)), graph.first_above(within, rest))
    finite = graph("LessOrEqual", np.float64(1), total)  # the largest weight is 1; no comparison with NaN is true
    graph("Where", finite, ids, np.int64(-1), name="ids")
    inputs = [("scores", TensorProto.FLOAT, "V"), ("inverse_temperature", TensorProto.FLOAT, 1), ("uniform", TensorProto.DOUBLE, 1)]
    made = helper.make_graph(
        graph.nodes,
        "draw",
        [helper.make_tensor_value_info(name, dtype, ["B", width]) for name, dtype, width in inputs],
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["B", 1])],
        graph.constants,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION, producer_name="attnserve")
    onnx.checker.check_model(model, full_check=True)
    return model


class _Graph:
    """Collects nodes. A call adds one and returns the name of its output; an argument that is an array becomes a constant."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def __call__(self, operator: str, *inputs: str | NDArray[np.generic] | np.generic, name: str | None = None, **attributes: int) -> str:
        names = [each if isinstance(each, str) else self._constant(np.asarray(each)) for each in inputs]
        self.nodes.append(helper.make_node(operator, names, [name or f"{operator}_{len(self.nodes)}"], **attributes))
        return str(self.nodes[-1].output[0])

    def _constant(self, value: NDArray[np.generic]) -> str:
        self.constants.append(numpy_helper.from_array(value, f"constant_{len(self.constants)}"))
        return str(self.constants[-1].name)

    def double(self, values: str) -> str:
        return self("Cast", values, to=TensorProto.DOUBLE)

    def cumulative(self, values: str) -> tuple[str, str]:
        """Return the cumulative sums of each row and its total: (B, K) -> (B, K), (B, 1)."""
        sums = self("CumSum", values, np.int64(1))
        return sums, self("Gather", sums, np.array([-1]), axis=1)

    def below(self, target: str, total: str) -> str:
        """Limit a target to what is below the total, which rounding may have reached, so that some sum is above it: (B, 1), (B, 1)."""
        # Not a product with 1 - eps, which onnxruntime removes, as it compares the factor with 1 in float32.
        return self("Min", target, self("Sub", total, self("Mul", total, np.finfo(np.float64).eps)))

    def first_above(self, cumulative: str, target: str) -> str:
        """Return the first index at which the cumulative sum exceeds the target: (B, K), (B, 1) -> (B, 1)."""
        return self("ArgMax", self("Cast", self("Greater", cumulative, target), to=TensorProto.INT32), axis=1, keepdims=1)


if __name__ == "__main__":
    onnx.save(draw_graph(), FILE)
