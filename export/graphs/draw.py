"""The graph that draws a token for each row of scores, for any number of tokens. `python -m export.graphs.draw` writes it again.

The service runs it right after a step, on the core that has just computed the logits. It is a file of the service and not of a bundle,
because it has no weights and does not depend on the model.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

FILE = Path(__file__).parents[2] / "service" / "generation" / "sampling" / "draw.onnx"
_OPSET, _IR_VERSION = 18, 10
_DOUBLE, _FLOAT, _INT64 = TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.INT64


def draw_graph() -> ModelProto:
    """Return the graph that inverts the CDF of softmax(scores / temperature) at a uniform number. It first draws a block of `width` tokens
    and then a token in it, because a cumulative sum over all tokens takes as long as all the rest.

    Inputs: scores (B, V), of which -inf is never drawn; inverse_temperature (B, 1); uniform (B, 1), above 0 and below 1; width (1,), a
    divisor of V; shape (3,), the numbers 0, -1 and width. Outputs: ids (B, 1), and total (B, 1), about 1, or NaN in a row whose numbers are
    not finite.

    Few operators count: after a step, the caches have the model's weights, so each takes 3 microseconds before it computes anything. Every
    operator computes a row from this row alone, in an order that depends on V alone, so a row has the same bits in any batch.

    The first place at which the smaller of target and cumulative sum is largest is the first at which the sum reaches the target, or, if
    rounding keeps all sums below it, the last place with a weight above 0.
    """
    constants = {"last": np.array([-1]), "tokens": np.int64(1)}
    node = helper.make_node
    nodes = [
        node("Mul", ["scores", "inverse_temperature"], ["scaled"]),
        node("Softmax", ["scaled"], ["p"], axis=-1),
        node("Reshape", ["p", "shape"], ["blocks"]),  # (B, W, width)
        node("ReduceSum", ["blocks", "last"], ["sums"], keepdims=0),  # (B, W)
        node("Cast", ["sums"], ["precise"], to=_DOUBLE),
        node("CumSum", ["precise", "tokens"], ["up_to"]),
        node("CumSum", ["precise", "tokens"], ["before"], exclusive=1),
        node("Gather", ["up_to", "last"], ["total"], axis=1),
        node("Min", ["up_to", "uniform"], ["up_to_target"]),
        node("ArgMax", ["up_to_target"], ["block"], axis=1),  # (B, 1)
        node("GatherElements", ["before", "block"], ["before_block"], axis=1),
        node("Sub", ["uniform", "before_block"], ["rest"]),
        node("Cast", ["rest"], ["rest_of_block"], to=_FLOAT),
        node("GatherND", ["blocks", "block"], ["chosen"], batch_dims=1),  # (B, width)
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
        ("width", _INT64, [1]),
        ("shape", _INT64, [3]),
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
