"""Replaces the constant matrices of a graph by blocks: products become MatMulNBits, and tables are gathered as bytes.

MatMulNBits with int8 products (accuracy_level 4) rounds activations to 8 bits. So they are computed in two terms, x rounded by this
operator and the rest, as two rows of one product. A rough graph has the first term only.

The bits of a row must not depend on the other rows of its batch. With 4 bits, MatMulNBits has another kernel for a single row
(docs/decisions.md). Two terms are never a single row. A rough graph with 4 bits computes at least two tokens. Products after the choice of
the wanted tokens have 8 bits.
"""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from export import contract
from export.blocks.blocks import BLOCK, Array, Blocks
from export.graphs.compact import OPERATORS
from export.int8.recipes import with_nodes

Choice = Callable[[Array], Blocks | None]  # a matrix (M, K) -> its blocks, or None if it stays as it is

INT8_PRODUCTS = 4  # MatMulNBits's `accuracy_level`: activations are rounded to 8 bits, with a scale for each block


def with_blocks(model: ModelProto, choose: Choice, *, rough: bool = False) -> ModelProto:
    """Replace constant matrices by the blocks that `choose` returns. Changes `model`. If `rough`, activations are rounded to 8 bits.

    These are the right inputs (K, M) of MatMul, for which `choose` receives the transposed matrix (M, K), and the tables (M, K) of Gather.
    A table that is a product's matrix too is stored once, in 8 bits. Matrices are recognised by their values.
    """
    rewriting = _Rewriting(model, choose, rough=rough)
    return with_nodes(model, rewriting.with_two_tokens([new for node in model.graph.node for new in rewriting.nodes_of(node)]))


def tied_products(model: ModelProto) -> dict[str, NodeProto]:
    """Return the tables (M, K) that are also a product's matrix, transposed, each with such a product."""
    floats = _matrices(model)
    tables = {digest(numpy_helper.to_array(floats[name])): name for name in sorted(_tables(model) & floats.keys())}
    products = [node for node in model.graph.node if tables and node.op_type == "MatMul" and node.input[1] in floats]
    found = ((tables.get(digest(numpy_helper.to_array(floats[node.input[1]]).T)), node) for node in products)
    return {table: node for table, node in found if table is not None}


def digest(weights: Array) -> str:
    """Identify a matrix (M, K) by its values."""
    return sha256(np.ascontiguousarray(weights, np.float32).tobytes()).hexdigest()


class _Rewriting:
    """The state of one run of `with_blocks`."""

    def __init__(self, model: ModelProto, choose: Choice, *, rough: bool) -> None:
        self.model, self.rough = model, rough
        self.made: set[str] = set()  # names of the tensors that were added to the graph
        self.matrices: dict[str, tuple[str, Blocks]] = {}  # name of a matrix in the graph -> beginning of its tensors' names, its blocks
        floats = _matrices(model)
        tables = _tables(model) & floats.keys()
        products = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in floats]
        factors = {node.input[1] for node in products} - tables
        chosen_tokens = _after(model, contract.WANTED)
        in_bytes = tables | {node.input[1] for node in products if node.input[0] in chosen_tokens}
        chosen: dict[str, tuple[str, Blocks] | None] = {}
        for name in [*sorted(tables), *sorted(factors)]:
            weights: Array = numpy_helper.to_array(floats[name])
            weights = weights if name in tables else weights.T
            if (key := digest(weights)) not in chosen:
                blocks = choose(weights)
                chosen[key] = None if blocks is None else (name, blocks.widened if name in in_bytes else blocks)
            if (found := chosen[key]) is not None:
                self.matrices[name] = found

    def nodes_of(self, node: NodeProto) -> list[NodeProto]:
        """Return the nodes in the place of `node`."""
        if node.op_type == "MatMul" and node.input[1] in self.matrices:
            return self._product(node.input[0], *self.matrices[node.input[1]], node.output[0])
        if reads_rows(node) and node.input[0] in self.matrices:
            return self._rows(*self.matrices[node.input[0]], node.input[1], node.output[0])
        return [node]

    def with_two_tokens(self, nodes: list[NodeProto]) -> list[NodeProto]:
        """Let the nodes read at least two tokens, if the graph is rough and has products with 4 bits: (B, N) -> (B, N + 1) if B N = 1."""
        if not self.rough or all(blocks.bits == 8 for _, blocks in self.matrices.values()):
            return nodes
        for node in nodes:
            node.input[:] = ["tokens.two" if name == contract.TOKENS else name for name in node.input]
        return [
            _node("Size", [contract.TOKENS], "tokens.size"),
            _node("Sub", [self._ints("2"), "tokens.size"], "tokens.needed"),
            _node("Max", ["tokens.needed", self._ints("0")], "tokens.missing"),
            _node("Concat", [self._ints("0", "0", "0"), "tokens.missing"], "tokens.pads", axis=0),
            _node("Pad", [contract.TOKENS, "tokens.pads"], "tokens.two"),
            *nodes,
        ]

    def _product(self, x: str, name: str, blocks: Blocks, y: str) -> list[NodeProto]:
        """x (.., K) times the matrix (M, K) -> y (.., M)."""
        M, n = blocks.scales.shape
        weights = [self._constant(f"{name}.q", blocks.packed), self._constant(f"{name}.scales", blocks.scales)]
        sizes = {"N": M, "bits": blocks.bits, "block_size": BLOCK, "accuracy_level": INT8_PRODUCTS}
        if self.rough:
            summands = [y if blocks.offsets is None else f"{y}.product"]
            nodes = [_custom("MatMulNBits", [x, *weights], summands[0], K=blocks.K, **sizes)]
        else:
            summands = [f"{y}.first", f"{y}.second"]
            nodes = [
                *self._once(f"{x}.terms", lambda: self._two_terms(x, blocks.K)),
                _custom("MatMulNBits", [f"{x}.terms", *weights], f"{y}.terms", K=n * BLOCK, **sizes),
                helper.make_node("Split", [f"{y}.terms"], summands, name=f"{y}.split", axis=0, num_outputs=2),
            ]
        if blocks.offsets is not None:
            # The offset of a block is added to all its weights, so it is multiplied by the sum of the block's activations.
            sums = np.kron(np.eye(n, dtype=np.float32), np.ones((BLOCK, 1), np.float32))[: blocks.K]  # (K, n)
            offsets = self._constant(f"{name}.offsets", blocks.offsets.T)
            nodes += [
                *self._once(f"{x}.sums", lambda: [_node("MatMul", [x, self._constant(f"sums.{blocks.K}", sums)], f"{x}.sums")]),
                _node("MatMul", [f"{x}.sums", offsets], f"{y}.offsets"),
            ]
            summands.append(f"{y}.offsets")
        return nodes if summands == [y] else [*nodes, _node("Sum", summands, y)]

    def _two_terms(self, x: str, K: int) -> list[NodeProto]:
        """Return the nodes that make "x.terms" (2 B, .., K) from x (B, .., K), filled up to whole blocks: x, and below it x minus its
        rounded values, which are the product of its blocks with the identity matrix.
        """
        one = self._constant("identity.q", (np.eye(BLOCK, dtype=np.uint8) + np.uint8(128))[:, None])
        scale = self._constant("identity.scales", np.ones((BLOCK, 1), np.float32))
        sizes = {"K": BLOCK, "N": BLOCK, "bits": 8, "block_size": BLOCK, "accuracy_level": INT8_PRODUCTS}
        filled = x if K % BLOCK == 0 else f"{x}.in_whole_blocks"
        pads = [] if filled == x else [_node("Pad", [x, self._ints("0", str(-K % BLOCK)), "", self._ints("-1")], filled)]
        return [
            *pads,
            _node("Reshape", [filled, self._ints("-1", str(BLOCK))], f"{x}.blocks"),
            _custom("MatMulNBits", [f"{x}.blocks", one, scale], f"{x}.rounded_blocks", **sizes),
            _node("Shape", [filled], f"{x}.axes"),
            _node("Reshape", [f"{x}.rounded_blocks", f"{x}.axes"], f"{x}.rounded"),
            _node("Sub", [filled, f"{x}.rounded"], f"{x}.rest"),
            _node("Concat", [filled, f"{x}.rest"], f"{x}.terms", axis=0),
        ]

    def _rows(self, name: str, blocks: Blocks, places: str, y: str) -> list[NodeProto]:
        """Rows of the matrix (M, K) at `places` (..) -> y (.., K)."""
        tables = {f"{name}.q": blocks.packed, f"{name}.scales": blocks.scales}
        if blocks.offsets is not None:
            tables[f"{name}.row_offsets"] = blocks.offsets
        nodes = [_node("Gather", [self._constant(table, value), places], f"{y}.{table}", axis=0) for table, value in tables.items()]
        zero = self._constant(f"zero.{blocks.zero}", np.float32(blocks.zero))
        nodes += [
            _node("Cast", [f"{y}.{name}.q"], f"{y}.levels", to=TensorProto.FLOAT),
            _node("Sub", [f"{y}.levels", zero], f"{y}.centred"),
            _node("Unsqueeze", [f"{y}.{name}.scales", self._ints("-1")], f"{y}.scale"),
            _node("Mul", [f"{y}.centred", f"{y}.scale"], f"{y}.scaled"),
        ]
        if blocks.offsets is not None:
            nodes += [
                _node("Unsqueeze", [f"{y}.{name}.row_offsets", self._ints("-1")], f"{y}.offset"),
                _node("Add", [f"{y}.scaled", f"{y}.offset"], f"{y}.moved"),
            ]
        return [
            *nodes,
            _node("Shape", [places], f"{y}.row_axes"),
            _node("Concat", [f"{y}.row_axes", self._ints("-1")], f"{y}.row_shape", axis=0),
            _node("Reshape", [nodes[-1].output[0], f"{y}.row_shape"], f"{y}.filled"),
            _node("Slice", [f"{y}.filled", self._ints("0"), self._ints(str(blocks.K)), self._ints("-1")], y),
        ]

    def _constant(self, name: str, value: Any) -> str:
        """Store a constant of the graph, once, and return its name."""
        if name not in self.made:
            self.made.add(name)
            self.model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def _ints(self, *values: str) -> str:
        return self._constant(f"ints.{'.'.join(values)}", np.array(values, np.int64))

    def _once(self, name: str, nodes: Callable[[], list[NodeProto]]) -> list[NodeProto]:
        """Return the nodes that make the tensor `name`, if it is not in the graph yet."""
        if name in self.made:
            return []
        self.made.add(name)
        return nodes()


def _matrices(model: ModelProto) -> dict[str, TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2}


def _tables(model: ModelProto) -> set[str]:
    return {node.input[0] for node in model.graph.node if reads_rows(node)}


def _after(model: ModelProto, start: str) -> set[str]:
    """Return the tensors that depend on the tensor `start`."""
    found = {start}
    for node in model.graph.node:  # inputs come before what is computed from them
        if found & {*node.input}:
            found |= {*node.output}
    return found


def reads_rows(node: NodeProto) -> bool:
    return node.op_type == "Gather" and not any(attribute.name == "axis" and attribute.i for attribute in node.attribute)


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs, [output], name=output, **attributes)


def _custom(kind: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs, [output], name=output, domain=OPERATORS, **attributes)
