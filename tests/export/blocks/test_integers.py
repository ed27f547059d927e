"""Products of decoders with a scale for each token: near those in fp32, and the same bits for any batch and any cut of a prompt."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from export.blocks.integers import with_integer_products
from export.bundle import export_bundle
from export.int8.recipes import column_peaks
from export.kinds import decoder as decoder_kind
from tests.export.blocks.test_graph import K, M, V, graph, run, session

TOKENS = np.random.default_rng(1).integers(0, V, (4, 7))
FEED = {"tokens": TOKENS, "wanted": np.tile(np.arange(7), (4, 1))}


@pytest.mark.parametrize("levels", [127, 63])
def test_products_are_near_those_in_fp32_and_know_no_other_row(levels: int) -> None:
    model = with_integer_products(graph(), column_peaks(graph(), [FEED]), weight_levels=levels)
    operators = Counter(node.op_type for node in model.graph.node)
    assert operators["MatMulIntegerToFloat"] == 2
    matrices = {(tensor.data_type, *tensor.dims) for tensor in model.graph.initializer if len(tensor.dims) == 2}
    assert matrices == {(TensorProto.INT8, K, M), (TensorProto.INT8, K, V)}, "the table is stored once, as the product's matrix"
    made = session(model)
    got, want = run(made, TOKENS), run(session(graph()), TOKENS)
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= 0.03 * np.abs(b).max()
    for row in range(4):
        for first, last in ((0, 7), (0, 1), (3, 5)):
            for whole, part in zip(got, run(made, TOKENS[row : row + 1, first:last]), strict=True):
                assert np.array_equal(whole[row : row + 1, first:last], part)


def test_matrices_of_several_heads_stay_in_fp32() -> None:
    """As feature maps are: (H, D_k, D_φ), in one tensor."""
    model, maps = graph(), np.ones((1, 80, 4), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(maps, "maps"))
    model.graph.node.insert(1, helper.make_node("MatMul", ["all_rows", "maps"], ["features"]))
    made = with_integer_products(model, column_peaks(copied(model), [FEED]), weight_levels=127)
    (node,) = [node for node in made.graph.node if "features" in node.output]
    assert (node.op_type, node.input[1]) == ("MatMul", "maps")


def copied(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def test_a_decoder_that_would_lose_too_much_has_blocks(decoder_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_kind, "LOST_BITS", -1.0)
    checkpoint = decoder_bundle.with_name(f"{decoder_bundle.name}-checkpoint")
    manifest = export_bundle(checkpoint, tmp_path / "int8", precision="int8-rough")
    assert manifest.graph.optimisation == decoder_kind.in_blocks("int8-rough")
    assert "MatMulIntegerToFloat" not in manifest.graph.operators
    assert manifest.graph.operators["MatMulNBits"] > 2
