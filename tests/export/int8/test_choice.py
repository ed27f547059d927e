"""An int8 graph is served only if it was close enough to torch, and the account of what was tried goes with it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from export import contract
from export.bundle import export_bundle
from export.checks.parity import open_graph
from export.errors import ExportError
from export.int8 import choice
from export.int8.recipes import RECIPES, column_peaks, per_token, with_matmuls
from tests.checkpoints import tiny_classifier


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SECONDS", 0.01)


def test_the_fastest_recipe_above_the_bar_is_kept_and_all_are_told(encoder_checkpoint: Path, tmp_path: Path) -> None:
    fractions: list[float] = []
    progress = lambda step, fraction: fractions.append(fraction) if step == "int8" else None  # noqa: E731
    manifest = export_bundle(encoder_checkpoint, tmp_path / "int8", precision="int8", min_cosine=0.97, progress=progress)
    assert [trial.recipe for trial in manifest.trials] == [recipe.name for recipe in RECIPES]
    kept = [trial for trial in manifest.trials if trial.kept]
    assert len(kept) == 1
    assert kept[0].min_cosine >= 0.97
    assert kept[0].rank_correlation is not None
    assert 0.9 < kept[0].rank_correlation < 1
    assert manifest.graph.optimisation.endswith(kept[0].recipe)
    assert contract.read_golden(tmp_path / "int8", contract.Golden).min_cosine == 0.97
    assert fractions == sorted(fractions)
    assert contract.verify(tmp_path / "int8") == manifest
    # The weights are in a file that a server maps into memory: all its sessions have the table of the vocabulary once.
    tensors = onnx.load(tmp_path / "int8" / contract.GRAPH, load_external_data=False).graph.initializer
    assert max(tensors, key=lambda tensor: int(np.prod(tensor.dims))).data_location == onnx.TensorProto.EXTERNAL
    assert (tmp_path / "int8" / "model.onnx.data").stat().st_mode == (tmp_path / "int8" / contract.GRAPH).stat().st_mode


def test_a_manifest_without_rank_correlations_is_written_without_their_name(encoder_bundle: Path) -> None:
    """So that a bundle of an earlier version keeps its fingerprint."""
    trial = contract.RecipeTrial(
        recipe="r", min_cosine=1, mean_cosine=1, size_bytes=1, texts_per_s=1, baseline_texts_per_s=1, kept=True, rank_correlation=0.5
    )
    manifest = contract.read_manifest(encoder_bundle)
    earlier, now = (manifest.model_copy(update={"trials": (trial.model_copy(update={"rank_correlation": r}),)}) for r in (None, 0.5))
    assert "rank_correlation" not in contract.dump(earlier)
    assert "rank_correlation" in contract.dump(now)
    assert earlier.fingerprint != now.fingerprint


def test_a_bar_that_no_recipe_reaches_is_an_error_that_says_what_each_reached(encoder_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no int8 recipe reaches a cosine of 0\.9999999 on every text\. .*: a scale per token"):
        export_bundle(encoder_checkpoint, tmp_path / "int8", precision="int8", min_cosine=0.9999999)
    assert not list(tmp_path.iterdir())


def test_a_reranker_is_judged_by_how_its_logits_differ_between_texts(tmp_path: Path) -> None:
    manifest = export_bundle(tiny_classifier(tmp_path / "checkpoint", n_labels=1), tmp_path / "int8", precision="int8", min_cosine=0.9)
    assert 0.9 <= manifest.parity.min_cosine < 1
    golden = contract.read_golden(tmp_path / "int8", contract.Golden)
    assert golden.min_cosine is None
    assert golden.max_abs_error == pytest.approx(0.25 * np.abs(golden.outputs).max())


def product(d_in: int, d_out: int) -> tuple[onnx.ModelProto, np.ndarray]:
    """y = x W, as the `Gemm` that torch writes, with W transposed and a bias of 0."""
    W = np.random.default_rng(0).standard_normal((d_out, d_in)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "W", "b"], ["y"], transB=1)],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("T", d_in))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("T", d_out))],
        [numpy_helper.from_array(W, "W"), numpy_helper.from_array(np.zeros(d_out, np.float32), "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), W.T


def test_a_token_keeps_its_bits_whatever_stands_beside_it(tmp_path: Path) -> None:
    """One scale for each token: a neighbour a thousand times larger changes nothing, and neither does a token of zeros."""
    model, W = product(32, 16)
    x = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    x[1] *= 1000
    x[2] = 0
    matmuls = with_matmuls(model)
    # In 7 bits: without VNNI, sums of products by weights in 8 bits are cut at 16 bits.
    onnx.save(per_token(matmuls, {"x": np.ones(32, np.float32)}, weight_levels=63), tmp_path / "int8.onnx")
    session = open_graph(tmp_path / "int8.onnx", threads=1)
    (together,), (alone,) = session.run(None, {"x": x}), session.run(None, {"x": x[:1]})
    assert (together[0] == alone[0]).all()
    assert not together[2].any()
    error = np.abs(together - x @ W).max(axis=1)
    assert error[0] < 0.3
    assert error[1] < 300


def test_columns_are_smoothed_by_the_largest_value_seen_in_any_batch() -> None:
    model, _ = product(2, 4)
    peaks = column_peaks(with_matmuls(model), [{"x": np.array([[1, -5], [3, 2]], np.float32)}, {"x": np.array([[-4, 1]], np.float32)}])
    assert {name: peak.tolist() for name, peak in peaks.items()} == {"x": [4, 5]}
