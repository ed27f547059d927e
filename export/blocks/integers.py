"""Products of a decoder's graph in 8-bit integers, with a scale for each token and one for each column of the weights. They are exact, so
the bits of a row depend neither on its batch nor on how a prompt is cut, and 8 rows take less than 8 times as long as one.
"""

from functools import partial

from onnx import ModelProto, NodeProto, TensorProto, helper

from export.blocks.blocks import rounded
from export.blocks.graph import reads_rows, tied_products, with_blocks
from export.int8.recipes import ColumnPeaks, per_token, with_nodes


def with_integer_products(model: ModelProto, peaks: ColumnPeaks, *, weight_levels: int) -> ModelProto:
    """Quantise all products with constant weights, and tables, to 8 bits. Changes `model`. A table that is a product's matrix too is stored
    once.
    """
    tied = {table: (product.input[0], product.output[0]) for table, product in tied_products(model).items()}
    made = per_token(model, peaks, weight_levels=weight_levels)
    nodes: list[NodeProto] = []
    for node in made.graph.node:
        nodes += _columns(*tied[node.input[0]], node) if reads_rows(node) and node.input[0] in tied else [node]
    return with_blocks(with_nodes(made, nodes), partial(rounded, bits=8))


def _columns(x: str, y: str, gather: NodeProto) -> list[NodeProto]:
    """Return the nodes that read rows at places (B, N) of a table (M, K) -> (B, N, K) from the columns of the matrix (K, M) of y = x W."""
    places, rows = gather.input[1], gather.output[0]
    return [
        helper.make_node("Gather", [f"{y}.weight", places], [f"{rows}.columns"], axis=1),  # (K, B, N)
        helper.make_node("Transpose", [f"{rows}.columns"], [f"{rows}.levels"], perm=[1, 2, 0]),
        helper.make_node("Cast", [f"{rows}.levels"], [f"{rows}.floats"], to=TensorProto.FLOAT),
        helper.make_node("Gather", [f"{y}.scales", places], [f"{rows}.scales"]),
        helper.make_node("Unsqueeze", [f"{rows}.scales", "int8.last_axis"], [f"{rows}.scale"]),
        helper.make_node("Mul", [f"{rows}.floats", f"{rows}.scale"], [f"{rows}.scaled"]),
        helper.make_node("Mul", [f"{rows}.scaled", f"{x}.smoothing"], [rows]),
    ]
