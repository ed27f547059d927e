"""Products and tables of blocks: their values are those of the matrix, and the bits of a row do not depend on the other rows."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.blocks.blocks import BLOCK, Blocks, in_blocks, rounded
from export.blocks.graph import digest, with_blocks

V, K, M = 50, 80, 40
# Largest error relative to the largest result: activations in two terms of 8 bits, and in one.
ERRORS = {"two terms": 2e-4, "rough": 0.02}
random = np.random.default_rng(0)
TABLE = random.standard_normal((V, K)).astype(np.float32)
NARROW = random.standard_normal((M, K)).astype(np.float32)


def graph() -> onnx.ModelProto:
    """Rows of a table and their product with a matrix, of which some are wanted, and the product of those rows with the table:
    tokens (B, N), wanted (B, W) -> rows (B, W, K), narrow (B, W, M), logits (B, W, V)."""
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["all_rows"]),
        helper.make_node("MatMul", ["all_rows", "narrow_matrix"], ["all_narrow"]),
        helper.make_node("Unsqueeze", ["wanted", "last"], ["places"]),
        helper.make_node("GatherND", ["all_rows", "places"], ["rows"], batch_dims=1),
        helper.make_node("GatherND", ["all_narrow", "places"], ["narrow"], batch_dims=1),
        helper.make_node("MatMul", ["rows", "turned"], ["logits"]),
    ]
    constants = {"table": TABLE, "narrow_matrix": NARROW.T, "turned": TABLE.T, "last": np.array([-1])}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["B", axis]) for name, axis in (("tokens", "N"), ("wanted", "W"))]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", "W", None]) for n in ("rows", "narrow", "logits")]
    return helper.make_model(
        helper.make_graph(
            nodes,
            "products",
            inputs,
            outputs,
            [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 23)],
        ir_version=11,
    )


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(made: ort.InferenceSession, tokens: np.ndarray) -> list[np.ndarray]:
    """Return the outputs for all tokens (B, N)."""
    B, N = tokens.shape
    return made.run(None, {"tokens": tokens, "wanted": np.tile(np.arange(N), (B, 1))})


def with_offsets(weights: np.ndarray, bits: int) -> Blocks:
    """Blocks with an offset each, as in the format Q4_1: the smallest weight is q = 0, the largest the highest q."""
    w = in_blocks(weights)
    least, most, levels = w.min(2), w.max(2), 2**bits - 1
    scales = (most - least) / levels
    q = np.rint((w - least[..., None]) / scales[..., None]).astype(np.uint8)
    return Blocks(bits, weights.shape[1], q, scales, least + (1 << (bits - 1)) * scales)


CHOICES = {
    "8 bits": lambda weights: rounded(weights, 8),
    "4 bits": lambda weights: rounded(weights, 4),
    "8 bits and offsets": lambda weights: with_offsets(weights, 8),
    "4 bits and offsets": lambda weights: with_offsets(weights, 4),
}


@pytest.mark.parametrize("activations", ERRORS)
@pytest.mark.parametrize("name", CHOICES)
def test_products_and_tables_have_the_values_of_the_blocks(name: str, activations: str) -> None:
    choose = CHOICES[name]
    made = session(with_blocks(graph(), choose, rough=activations == "rough"))
    tokens = random.integers(0, V, (3, 5))
    rows, narrow, logits = run(made, tokens)
    table, matrix = choose(TABLE).weights(), choose(NARROW).weights()
    np.testing.assert_allclose(rows, table[tokens], rtol=1e-6, atol=1e-6)
    for got, wanted in ((narrow, rows @ matrix.T), (logits, rows @ table.T)):
        assert np.abs(got - wanted).max() < ERRORS[activations] * np.abs(wanted).max()


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_a_row_has_the_same_bits_alone_and_in_every_batch(name: str, rough: bool) -> None:
    """With 4 bits, MatMulNBits has another kernel for a single row."""
    made = session(with_blocks(graph(), CHOICES[name], rough=rough))
    tokens = random.integers(0, V, (1, 70))
    whole = run(made, tokens)
    for n in (1, 2, 3, 7, 64):
        parts = [run(made, tokens[:, start : start + n]) for start in range(0, 70, n)]
        assert all(
            np.array_equal(np.concatenate(part, axis=1), all_) for part, all_ in zip(zip(*parts, strict=True), whole, strict=True)
        ), n
    beside = run(made, tokens.reshape(7, 10))
    assert all(np.array_equal(part.reshape(all_.shape), all_) for part, all_ in zip(beside, whole, strict=True))


@pytest.mark.parametrize(("rough", "rows_of_products"), [(True, (2, 2, 3)), (False, (2, 4, 6))])
@pytest.mark.parametrize("name", [name for name in CHOICES if name.startswith("4 bits")])
def test_a_product_with_4_bits_has_at_least_two_rows(name: str, rough: bool, rows_of_products: tuple[int, ...]) -> None:
    """Some CPUs give both kernels' rows the same bits, so this looks at the rows themselves."""
    model = with_blocks(graph(), CHOICES[name], rough=rough)
    (product,) = (node for node in model.graph.node if any(each.name == "bits" and each.i == 4 for each in node.attribute))
    model.graph.output.append(helper.make_tensor_value_info(product.input[0], TensorProto.FLOAT, [None, None, None]))
    made = session(model)
    for (B, N), rows in zip(((1, 1), (2, 1), (1, 3)), rows_of_products, strict=True):
        *_, factor = run(made, np.zeros((B, N), np.int64))
        assert factor.reshape(-1, factor.shape[-1]).shape[0] == rows


def test_a_product_of_wanted_tokens_has_8_bits() -> None:
    """There may be one such token, also in a call of many."""
    model = graph()
    model.graph.node[5].input[1] = "narrow_matrix"
    made = session(with_blocks(model, CHOICES["4 bits"], rough=True))
    tokens = random.integers(0, V, (1, 7))
    whole = run(made, tokens)[2]
    for place in range(7):
        assert np.array_equal(made.run(["logits"], {"tokens": tokens, "wanted": np.array([[place]])})[0], whole[:, place : place + 1])


def test_a_table_that_a_product_uses_too_is_stored_once() -> None:
    """The exporter stores the two as matrices of their own, one turned."""
    model = with_blocks(graph(), CHOICES["4 bits"])
    bytes_of = {tensor.name: len(tensor.raw_data) for tensor in model.graph.initializer}
    filled = K + 16  # the last block of a row has 16 weights
    assert bytes_of["table.q"] == V * filled  # in 8 bits, so that rows can be gathered
    assert bytes_of["narrow_matrix.q"] == M * filled / 2
    assert sum(bytes_of.values()) < V * filled + M * filled / 2 + 4 * (V + M) * filled / BLOCK + 2048  # and the identity matrix of a block


def test_a_matrix_that_is_not_chosen_stays() -> None:
    kept = digest(NARROW)
    model = with_blocks(graph(), lambda weights: None if digest(weights) == kept else rounded(weights, 8))
    assert [node.op_type for node in model.graph.node].count("MatMul") == 1
    assert "narrow_matrix" in {tensor.name for tensor in model.graph.initializer}


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_to_the_nearest_level(bits: int) -> None:
    blocks = rounded(NARROW, bits)
    largest = np.abs(blocks.scales).repeat(BLOCK, axis=1)[:, :K]
    # The highest level is one step short of the lowest one, so a weight opposite to the furthest one may be off by a whole step.
    assert np.all(np.abs(blocks.weights() - NARROW) <= largest * 1.001)
    assert np.mean(np.abs(blocks.weights() - NARROW) <= largest * 0.501) > 0.97
    assert not rounded(np.zeros((2, 64), np.float32), bits).weights().any()
