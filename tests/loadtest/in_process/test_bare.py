"""What the bare runtime allows, worked out of its rates; and a run of it on a bundle."""

import shutil
from pathlib import Path

import pytest

from loadtest.errors import LoadtestError
from loadtest.in_process import bare


def test_the_best_batch_sets_the_cost_of_a_length():
    assert bare.cost_s({(1, 8): 100.0, (32, 8): 400.0, (1, 64): 20.0, (16, 64): 10.0}) == {8: 1 / 400, 64: 1 / 20}


def test_between_two_lengths_the_cost_is_a_line():
    costs = {8: 0.002, 16: 0.004, 64: 0.04}
    assert bare.between(12, costs) == pytest.approx(0.003)
    assert bare.between(16, costs) == 0.004
    assert bare.between(40, costs) == pytest.approx(0.022)
    assert bare.between(4, costs) == pytest.approx(0.001)
    assert bare.between(128, costs) == pytest.approx(0.08)


def test_the_allowed_rate_is_texts_over_the_sum_of_their_costs():
    assert bare.allowed_per_s([8, 8, 16], {8: 0.002, 16: 0.004}) == pytest.approx(3 / 0.008)


def test_shapes_stay_within_the_model_and_the_batch():
    shapes = bare.shapes_for_mix(100)
    assert max(n for _, n in shapes) == 100
    assert all(b * n <= bare.MAX_BATCH_TOKENS for b, n in shapes)
    assert bare.shapes_for_mix(512)[-1][1] == 256


def test_a_length_is_run_in_the_graph_that_computes_it(hybrid_bundle: Path, tmp_path: Path):
    """Without its graph for short texts, only longer texts can be run."""
    bundle = Path(shutil.copytree(hybrid_bundle, tmp_path / "bundle"))
    assert set(bare.measure(bundle, [(1, 64), (1, 65)], threads=1, seconds=0.05, spin=False)) == {(1, 64), (1, 65)}
    (bundle / "short.onnx").unlink()
    bare.measure(bundle, [(1, 65)], threads=1, seconds=0.05, spin=False)
    with pytest.raises(LoadtestError, match=r"short\.onnx"):
        bare.measure(bundle, [(1, 64)], threads=1, seconds=0.05, spin=False)


def test_what_is_no_bundle_is_an_error(tmp_path: Path):
    with pytest.raises(LoadtestError, match="is not a bundle"):
        bare.measure(tmp_path, [(1, 8)], threads=1, seconds=0.05, spin=False)
