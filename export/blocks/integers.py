"""Products of a decoder's graph in 8-bit integers, with a scale for each token and one for each column of the weights.

A product of whole integers is exact, so the bits of a row depend neither on its batch nor on how a prompt is cut. Blocks with a scale each
(`graph.py`) are more accurate, but onnxruntime computes them row by row, so 8 rows take nearly 8 times as long as one.
"""

from functools import partial

from onnx import ModelProto

from export.blocks.blocks import rounded
from export.blocks.graph import tied_matrices, with_blocks
from export.int8.recipes import ColumnPeaks, per_token


def with_integer_products(model: ModelProto, peaks: ColumnPeaks, *, weight_levels: int) -> ModelProto:
    """Quantise all products with constant weights, and tables, to 8 bits. Changes `model`; the other arguments are those of `per_token`.

    A table that is a product's matrix too is stored once, in blocks, and so is this product computed.
    """
    made = per_token(model, peaks, weight_levels=weight_levels, left_out=tied_matrices(model))
    return with_blocks(made, partial(rounded, bits=8))
