"""The graph that draws a token for each row of scores, for any number of tokens. `python -m export.graphs.draw` writes it again.

The service runs it right after a step, on the core that has just computed the logits. It is a file of the service and not of a bundle,
because it has no weights and does not depend on the model.

It inverts the CDF of softmax(scores / temperature) at a uniform number: first a block of tokens and then a token in it.

Inputs: scores (B, V), of which -inf is never drawn; inverse_temperature (B, 1); uniform (B, 1), above 0 and below 1; padding (4,), the
numbers 0, 0, 0 and that of tokens by which V is less than a multiple of BLOCK. Outputs: ids (B, 1), and total (B, 1), at least 1, or NaN in
a row whose scores are not finite. The largest inverse temperature and uniform = 1e-25 give the first of the largest scores.

Few operators count, as each takes 3 microseconds after a step. Every operator computes a row from this row alone, in an order that depends
on V alone, so a row has the same bits in any batch. The first place at which the smaller of target and cumulative sum is largest is the
first at which the sum reaches the target, or, if rounding keeps all sums below it, the last with a weight that counts.
"""

from pathlib import Path

import onnx

FILE = Path(__file__).parents[2] / "service" / "generation" / "sampling" / "draw.onnx"
BLOCK = 64  # tokens
# A larger depth counts as this one, because numbers below 1e-38 take ten times as long. exp(DEEPEST) is 2e-35, so that even a million such
# tokens are never drawn: random numbers are multiples of 1e-16.
DEEPEST = -80
GRAPH = f"""
<ir_version: 10, opset_import: ["": 18], producer_name: "attnserve">
draw (float[B, V] scores, float[B, 1] inverse_temperature, double[B, 1] uniform, int64[4] padding)
    => (int64[B, 1] ids, double[B, 1] total)
    <int64[1] last = {{-1}}, int64 tokens = {{1}}, float deepest = {{{DEEPEST}}},
     int64[3] shape = {{0, -1, {BLOCK}}}, int64 width = {{{BLOCK}}}>
{{
    peak = ReduceMax(scores, last)
    distances = Sub(scores, peak)
    depths = Mul(distances, inverse_temperature)
    limited = Max(depths, deepest)
    weights = Exp(limited)
    padded = Pad(weights, padding)
    blocks = Reshape(padded, shape)
    sums = ReduceSum<keepdims = 0>(blocks, last)
    precise = Cast<to = {onnx.TensorProto.DOUBLE}>(sums)
    up_to = CumSum(precise, tokens)
    before = CumSum<exclusive = 1>(precise, tokens)
    total = Gather<axis = 1>(up_to, last)
    target = Mul(uniform, total)
    up_to_target = Min(up_to, target)
    block = ArgMax<axis = 1>(up_to_target)
    before_block = GatherElements<axis = 1>(before, block)
    rest = Sub(target, before_block)
    rest_of_block = Cast<to = {onnx.TensorProto.FLOAT}>(rest)
    chosen = GatherND<batch_dims = 1>(blocks, block)
    within = CumSum(chosen, tokens)
    within_target = Min(within, rest_of_block)
    place = ArgMax<axis = 1>(within_target)
    first = Mul(block, width)
    ids = Add(first, place)
}}
"""  # peak (B, 1); blocks (B, W, BLOCK), of W blocks; sums (B, W); block (B, 1); chosen (B, BLOCK)


def draw_graph() -> onnx.ModelProto:
    """Return the graph."""
    model = onnx.parser.parse_model(GRAPH)
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    onnx.save(draw_graph(), FILE)
