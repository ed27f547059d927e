"""Products of decoders with a scale for each token: near those in fp32, and the same bits for any batch and any cut of a prompt."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from export.blocks.integers import with_integer_products
from export.bundle import export_bundle
from export.int8.recipes import column_peaks
from export.kinds import decoder as decoder_kind
from tests.decoders import tiny_decoder
from tests.export.blocks.test_graph import V, graph, run, session

TOKENS = np.random.default_rng(1).integers(0, V, (4, 7))
FEED = {"tokens": TOKENS, "wanted": np.tile(np.arange(7), (4, 1))}


@pytest.mark.parametrize("levels", [127, 63])
def test_products_are_near_those_in_fp32_and_know_no_other_row(levels: int) -> None:
    model = with_integer_products(graph(), column_peaks(graph(), [FEED]), weight_levels=levels)
    operators = Counter(node.op_type for node in model.graph.node)
    assert operators["MatMulIntegerToFloat"] == 1, "the matrix that is no table"
    assert operators["MatMulNBits"] == 1, "the table, which is stored once"
    made = session(model)
    got, want = run(made, TOKENS), run(session(graph()), TOKENS)
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= 0.03 * np.abs(b).max()
    for row in range(4):
        for first, last in ((0, 7), (0, 1), (3, 5)):
            for whole, part in zip(got, run(made, TOKENS[row : row + 1, first:last]), strict=True):
                assert np.array_equal(whole[row : row + 1, first:last], part)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder(tmp_path_factory.mktemp("int8") / "checkpoint", d_model=32, n_layers=2, layers="gated_delta", positions="none")


def test_a_decoder_in_int8_has_a_scale_for_each_token(checkpoint: Path, tmp_path: Path) -> None:
    manifest = export_bundle(checkpoint, tmp_path / "int8", precision="int8")
    assert manifest.graph.optimisation.endswith("a scale for each token")
    assert manifest.graph.operators["MatMulIntegerToFloat"] > 2
    assert manifest.decoder is not None
    assert manifest.decoder.exact


def test_a_decoder_that_would_lose_too_much_has_blocks(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_kind, "LOST_BITS", -1.0)
    manifest = export_bundle(checkpoint, tmp_path / "int8", precision="int8")
    assert manifest.graph.optimisation == decoder_kind.INT8_IN_BLOCKS
    assert "MatMulIntegerToFloat" not in manifest.graph.operators
    assert manifest.graph.operators["MatMulNBits"] > 2
