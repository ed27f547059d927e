"""The student before it is trained, what is asked of it, and how its likeness is measured."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from models.checkpoints.published import load_checkpoint
from models.encoder.pooling import unit_length
from models.folders.folder import CheckpointError
from models.training.distillation.batches import padded
from models.training.distillation.config import DistillationConfig
from models.training.distillation.evaluation import by_kind, likeness, spearman
from models.training.distillation.objectives import Embedder
from models.training.distillation.student import repeated_positions, with_attention
from tests.checkpoints import tiny_classifier

SAME = 1e-5  # float32


@pytest.fixture(scope="module")
def pair(teacher: Path) -> tuple[Embedder, Embedder]:
    source = load_checkpoint(teacher)
    return tuple(
        Embedder(with_attention(source, name, options, 200), "mean") for name, options in (("softmax", {}), ("hybrid", {"block": 8}))
    )


def rows(*lengths: int) -> list[list[int]]:
    return [[2, *(5 + (i * 7 + length) % 40 for i in range(length - 2)), 3] for length in lengths]


@torch.no_grad()
def test_texts_of_up_to_two_blocks_are_read_as_the_teacher_reads_them(pair: tuple[Embedder, Embedder]) -> None:
    for lengths, same in (((16, 9, 3), True), ((40, 33), False)):
        e, wanted = (one.vectors(padded(rows(*lengths)))[0] for one in reversed(pair))
        assert ((e - wanted).abs().max() <= SAME) == same


def test_positions_begin_again() -> None:
    table = torch.randn(5, 2)
    assert torch.equal(repeated_positions(table, 12), torch.cat([table, table, table[:2]]))


def test_teachers_and_layers_that_do_not_fit_are_refused(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the teacher must be an encoder with softmax attention"):
        with_attention(load_checkpoint(tiny_classifier(tmp_path)), "hybrid", {}, 100)
    with pytest.raises(CheckpointError, match="projections of other shapes"):
        with_attention(load_checkpoint(teacher), "narrow", {}, 100)


# Likeness


def test_ranks_are_spearmans() -> None:
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=200)
    y = x + drawn.normal(size=200)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)
    assert spearman(x, np.exp(3 * x)) == pytest.approx(1.0)
    assert spearman(x, -x) == pytest.approx(-1.0)


def test_likeness_by_kind() -> None:
    e = unit_length(torch.randn(6, 8))
    other = e.clone()
    other[5] = -e[5]
    assert likeness(e, e).cosine == pytest.approx(1.0)
    kinds = by_kind(other, e, ["a", "a", "a", "b", "b", "b"])
    assert list(kinds) == ["a", "b", "all"]
    assert (kinds["a"].texts, kinds["a"].ranks) == (3, pytest.approx(1.0))
    assert kinds["b"].lowest == pytest.approx(-1.0)
    assert kinds["all"].cosine == pytest.approx(4 / 6)


# Plans


def test_plans_that_make_no_run_are_refused() -> None:
    with pytest.raises(ValueError, match="attention='causal_linear' is not one of softmax"):
        DistillationConfig(attention="causal_linear")
    with pytest.raises(ValueError, match="must not both be 0"):
        DistillationConfig(attention="hybrid", transfer_steps=0, end_to_end_steps=0)
    with pytest.raises(ValueError, match="longest=9000 must be ordered"):
        DistillationConfig(attention="hybrid", longest=9_000, tokens=10_000)
