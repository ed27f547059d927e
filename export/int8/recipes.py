"""Quantises the matrix products of a graph to 8-bit integers, for the CPU.

`per_token` computes a scale for each token with ordinary operators around the integer product, so that a text's vector does not depend on
the other texts. Before that, it moves the outliers of single columns into the weights (SmoothQuant: Xiao et al. 2022, arXiv:2211.10438, eq.
4). Figures: docs/decisions.md.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from export.checks.parity import Feed, open_graph
from export.graphs.compact import OPERATORS
from export.graphs.onnx_file import save

Array = NDArray[np.float32]
ColumnPeaks = Mapping[str, Array]  # name of a product's left input -> the largest |value| in each of its columns

SMOOTHING = 0.6  # SmoothQuant's α: 0.5 and 0.7 gave cosines of 0.9925 and 0.9933, 0.6 gave 0.9941 (MiniLM)


class Recipe(NamedTuple):
    """A range of the weights: its name in a manifest, and the largest weight."""

    name: str
    weight_levels: int


def column_peaks(model: ModelProto, feeds: list[Feed]) -> dict[str, Array]:
    """For each product with constant weights, return the largest |value| in each column of its left input. Changes `model`."""
    names = list(_products_by_left(model))
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    with TemporaryDirectory() as folder:
        save(model, Path(folder) / "probe.onnx")
        session = open_graph(Path(folder) / "probe.onnx")
    peaks: dict[str, Array] = {}
    for feed in feeds:
        for name, value in zip(names, session.run(names, feed), strict=True):
            peak = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0, initial=0)
            peaks[name] = np.maximum(peaks.get(name, peak), peak)
    return peaks


def with_matmuls(model: ModelProto) -> ModelProto:
    """Replace every `Gemm` that has constant weights by `MatMul` and `Add`, because only `MatMul` is quantised. Changes `model`."""
    weights = _weights(model)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "Gemm" or node.input[1] not in weights:
            nodes.append(node)
            continue
        weight = weights[node.input[1]]
        if any(a.name == "transB" and a.i for a in node.attribute):
            values = numpy_helper.to_array(weight).T
            if (name := f"{weight.name}.T") not in weights:
                model.graph.initializer.append(weights.setdefault(name, numpy_helper.from_array(np.ascontiguousarray(values), name)))
        else:
            name = weight.name
        product = f"{node.output[0]}.product" if len(node.input) == 3 else node.output[0]
        nodes.append(helper.make_node("MatMul", [node.input[0], name], [product]))
        if len(node.input) == 3:
            nodes.append(helper.make_node("Add", [product, node.input[2]], [node.output[0]]))
    return with_nodes(model, nodes)


def per_token(model: ModelProto, peaks: ColumnPeaks, *, weight_levels: int = 127) -> ModelProto:
    """Quantise with one scale per token and one per column of the weights. Changes `model`.

    A product y = x W becomes x times "x.smoothing" (K,) in bytes, times the integers "y.weight" (K, M), times "y.scales" (M,) and the
    tokens' scales. `weight_levels` is the largest int8 weight; with 63, sums of two products fit into 16 bits.
    """
    weights, groups = _weights(model), _products_by_left(model)
    constants: dict[str, NDArray[Any] | np.generic] = {
        "int8.one": np.float32(1),
        "int8.zero_point": np.uint8(128),
        "int8.levels": np.float32(127),
        "int8.tiny": np.float32(1e-9),
        "int8.last_axis": np.array([-1], np.int64),
    }
    smoothing: dict[str, Array] = {}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights:
            nodes.append(node)
            continue
        (x, W), y = node.input, node.output[0]
        if x not in smoothing:
            smoothing[x] = _smoothing(peaks[x], [numpy_helper.to_array(weights[product.input[1]]) for product in groups[x]])
            constants[f"{x}.smoothing"] = 1 / smoothing[x]
            nodes += _bytes_of(x)
        w, scales = _rounded(numpy_helper.to_array(weights[W]) * smoothing[x][:, None], weight_levels)
        constants |= {f"{y}.weight": w, f"{y}.scales": scales}
        operands = [f"{x}.bytes", f"{y}.weight", "int8.one", f"{y}.scales", "int8.zero_point"]
        nodes += [
            helper.make_node("MatMulIntegerToFloat", operands, [f"{y}.product"], domain=OPERATORS),
            helper.make_node("Mul", [f"{y}.product", f"{x}.down"], [y]),
        ]
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    return with_nodes(model, nodes)


def _bytes_of(x: str) -> list[NodeProto]:
    """Return nodes that quantise the tensor x (T, K). They write "x.bytes" (T, K), uint8 with zero point 128, and its scale "x.down" (T,
    1)."""
    return [
        helper.make_node("Mul", [x, f"{x}.smoothing"], [f"{x}.smooth"]),
        helper.make_node("Abs", [f"{x}.smooth"], [f"{x}.sizes"]),
        helper.make_node("ReduceMax", [f"{x}.sizes", "int8.last_axis"], [f"{x}.largest"], keepdims=1),  # (T, 1)
        helper.make_node("Max", [f"{x}.largest", "int8.tiny"], [f"{x}.above_0"]),
        helper.make_node("Div", ["int8.levels", f"{x}.above_0"], [f"{x}.up"]),
        helper.make_node("Mul", [f"{x}.smooth", f"{x}.up"], [f"{x}.in_levels"]),  # values from -127 to 127
        helper.make_node("QuantizeLinear", [f"{x}.in_levels", "int8.one", "int8.zero_point"], [f"{x}.bytes"]),
        helper.make_node("Reciprocal", [f"{x}.up"], [f"{x}.down"]),
    ]


# 8 bits are for CPUs with VNNI. Without it they are slower, or sums of two products are cut at 16 bits.
RECIPES = (Recipe("a scale per token, columns smoothed", 127), Recipe("a scale per token, columns smoothed, weights in 7 bits", 63))


def _smoothing(peak: Array, weights: list[Array]) -> Array:
    """Return the smoothing factors (K,). The columns of the activations are divided by them, and the rows of the weights multiplied."""
    rows = np.max([np.abs(w).max(axis=1) for w in weights], axis=0)
    smoothing: Array = np.maximum(peak, 1e-5) ** SMOOTHING / np.maximum(rows, 1e-5) ** (1 - SMOOTHING)
    return smoothing.astype(np.float32)


def _rounded(w: Array, levels: int) -> tuple[NDArray[np.int8], Array]:
    """Round weights (K, M) to int8 between -levels and levels. Returns them with the scale of each column (M,)."""
    scales = (np.maximum(np.abs(w).max(axis=0), 1e-12) / levels).astype(np.float32)
    return np.round(w / scales).astype(np.int8), scales


def _weights(model: ModelProto) -> dict[str, TensorProto]:
    """Return the constants, but not the matrices of several heads in one tensor, which stay in fp32."""
    return {tensor.name: tensor for tensor in model.graph.initializer if len(tensor.dims) < 3}


def _products_by_left(model: ModelProto) -> dict[str, list[NodeProto]]:
    """Return the products with constant weights, grouped by the name of their left input. The projections of q, k and v share one input."""
    weights = _weights(model)
    groups: dict[str, list[NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            groups.setdefault(node.input[0], []).append(node)
    return groups


def with_nodes(model: ModelProto, nodes: list[NodeProto]) -> ModelProto:
    """Replace the nodes of the model, remove weights that are no longer read, and declare onnxruntime's operator domain."""
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input} | {tensor.name for tensor in model.graph.output}
    for number in reversed(range(len(model.graph.initializer))):  # one at a time, because protobuf cannot copy a list of 2 GiB
        if model.graph.initializer[number].name not in read:
            del model.graph.initializer[number]
    if OPERATORS not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(OPERATORS, 1))
    return model
