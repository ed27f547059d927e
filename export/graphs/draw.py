"""The graph that draws a token for each row of scores, for any number of tokens. `python -m export.graphs.draw` writes it again.

The service runs it right after a step, on the core that has just computed the logits. It is a file of the service and not of a bundle,
because it has no weights and does not depend on the model.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

FILE = Path(__file__).parents[2] / "service" / "generation" / "sampling" / "draw.onnx"
BLOCK = 64  # tokens
# A larger depth counts as this one, because numbers below 1e-38 take ten times as long. exp(DEEPEST) is 2e-35, so that even a million such
# tokens are never drawn: random numbers are multiples of 1e-16.
DEEPEST = np.float32(-80)
_OPSET, _IR_VERSION = 18, 10
_DOUBLE, _FLOAT, _INT64 = TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.INT64


def draw_graph() -> ModelProto:
    """Return the graph that inverts the CDF of softmax(scores / temperature) at a uniform number: first a block of tokens and then a token
    in it.

    Inputs: scores (B, V), of which -inf is never drawn; inverse_temperature (B, 1); uniform (B, 1), above 0 and below 1; padding (4,), the
    numbers 0, 0, 0 and that of tokens by which V is less than a multiple of BLOCK. Outputs: ids (B, 1), and total (B, 1), at least 1, or
    NaN in a row whose scores are not finite. The largest inverse temperature and uniform = 1e-25 give the first of the largest scores.

    Few operators count, as each takes 3 microseconds after a step. Every operator computes a row from this row alone, in an order that
    depends on V alone, so a row has the same bits in any batch. The first place at which the smaller of target and cumulative sum is
    largest is the first at which the sum reaches the target, or, if rounding keeps all sums below it, the last with a weight that counts.
    """
    constants = {
        "last": np.array([-1]),
        "tokens": np.int64(1),
        "deepest": DEEPEST,
        "shape": np.array([0, -1, BLOCK]),
        "width": np.int64(BLOCK),
    }
    node = helper.make_node
    nodes = [
        node("ReduceMax", ["scores", "last"], ["peak"]),  # (B, 1)
        node("Sub", ["scores", "peak"], ["distances"]),
        node("Mul", ["distances", "inverse_temperature"], ["depths"]),
        node("Max", ["depths", "deepest"], ["limited"]),
        node("Exp", ["limited"], ["weights"]),
        node("Pad", ["weights", "padding"], ["padded"]),
        node("Reshape", ["padded", "shape"], ["blocks"]),  # (B, W, BLOCK)
        node("ReduceSum", ["blocks", "last"], ["sums"], keepdims=0),  # (B, W)
        node("Cast", ["sums"], ["precise"], to=_DOUBLE),
        node("CumSum", ["precise", "tokens"], ["up_to"]),
        node("CumSum", ["precise", "tokens"], ["before"], exclusive=1),
        node("Gather", ["up_to", "last"], ["total"], axis=1),
        node("Mul", ["uniform", "total"], ["target"]),
        node("Min", ["up_to", "target"], ["up_to_target"]),
        node("ArgMax", ["up_to_target"], ["block"], axis=1),  # (B, 1)
        node("GatherElements", ["before", "block"], ["before_block"], axis=1),
        node("Sub", ["target", "before_block"], ["rest"]),
        node("Cast", ["rest"], ["rest_of_block"], to=_FLOAT),
        node("GatherND", ["blocks", "block"], ["chosen"], batch_dims=1),  # (B, BLOCK)
        node("CumSum", ["chosen", "tokens"], ["within"]),
        node("Min", ["within", "rest_of_block"], ["within_target"]),
        node("ArgMax", ["within_target"], ["place"], axis=1),
        node("Mul", ["block", "width"], ["first"]),
        node("Add", ["first", "place"], ["ids"]),
    ]
    inputs = [
        ("scores", _FLOAT, ["B", "V"]),
        ("inverse_temperature", _FLOAT, ["B", 1]),
        ("uniform", _DOUBLE, ["B", 1]),
        ("padding", _INT64, [4]),
    ]
    graph = helper.make_graph(
        nodes,
        "draw",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info("ids", _INT64, ["B", 1]), helper.make_tensor_value_info("total", _DOUBLE, ["B", 1])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION, producer_name="attnserve")
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    onnx.save(draw_graph(), FILE)
