"""The student before it is trained, what is asked of it, and how its likeness is measured."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from models.checkpoints.published import load_checkpoint
from models.encoder.pooling import unit_length
from models.folders.folder import CheckpointError
from models.training.distillation.batches import TextBatches, TextError, cut_into_batches, padded
from models.training.distillation.config import DistillationConfig
from models.training.distillation.evaluation import by_kind, likeness, spearman
from models.training.distillation.objectives import Embedder, end_to_end_loss, teachers_layers, transfer_loss
from models.training.distillation.student import new_parameters, repeated_positions, with_attention
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


def test_new_parameters_are_the_maps_and_gains(pair: tuple[Embedder, Embedder]) -> None:
    names = {name.split("attention.")[1] for name in new_parameters(pair[1].encoder, pair[0].encoder)}
    assert names == {"phi_q.weight", "phi_q.bias", "phi_k.weight", "phi_k.bias", "log_gain"}


def test_teachers_and_layers_that_do_not_fit_are_refused(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the teacher must be an encoder with softmax attention"):
        with_attention(load_checkpoint(tiny_classifier(tmp_path)), "hybrid", {}, 100)
    with pytest.raises(CheckpointError, match="projections of other shapes"):
        with_attention(load_checkpoint(teacher), "narrow", {}, 100)


def test_what_a_layer_is_fed_and_asked_for_is_what_the_teacher_does(pair: tuple[Embedder, Embedder]) -> None:
    teacher, student = pair
    batch = padded(rows(40, 20))
    seen = teachers_layers(teacher, batch)
    assert torch.equal(seen[0][0], teacher.encoder.embeddings(batch[0], torch.arange(40), None))
    assert torch.equal(seen[1][1], teacher.encoder.blocks[1].attention(seen[1][0], batch[1] != 0))
    assert transfer_loss(teacher, teacher, batch) == 0
    assert transfer_loss(teacher, student, batch) > 0
    assert not any(block.attention._forward_hooks for block in teacher.encoder.blocks)


def test_the_end_to_end_loss_of_the_teacher_itself_is_0(pair: tuple[Embedder, Embedder]) -> None:
    teacher, student = pair
    batch, plan = padded(rows(40, 20)), DistillationConfig(attention="hybrid")
    assert float(end_to_end_loss(teacher, teacher, batch, plan).detach()) == pytest.approx(0, abs=SAME)
    assert end_to_end_loss(teacher, student, batch, plan) > 1e-4


# Batches


def test_batches_hold_all_texts_within_the_bound_and_are_a_function_of_the_step() -> None:
    texts = rows(*range(3, 60))
    cut = cut_into_batches(texts, tokens=128)
    assert sorted(i for batch in cut for i in batch) == list(range(len(texts)))
    assert all(len(batch) * max(len(texts[i]) for i in batch) <= 128 for batch in cut)
    batches = TextBatches(texts, tokens=128, shortest=20, seed=0)
    ids, mask = batches(3)
    assert torch.equal(ids, TextBatches(texts, tokens=128, shortest=20, seed=0)(3)[0])
    assert mask.sum(1).min() >= 20
    assert (ids[mask == 0] == 0).all()
    with pytest.raises(TextError, match="none of 57 texts has shortest=100 tokens"):
        TextBatches(texts, tokens=128, shortest=100, seed=0)


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


def test_rates_rise_and_fall_in_each_phase() -> None:
    plan = DistillationConfig(attention="hybrid", transfer_steps=100, end_to_end_steps=50, end_rate=1e-4)
    maps, rest = zip(*(plan.rates(step) for step in range(plan.steps)), strict=True)
    assert maps[0] < max(maps[:100]) <= plan.map_rate
    assert 0 < maps[99] < 0.01 * plan.map_rate
    assert set(rest[:100]) == {0.0}
    assert 0 < rest[149] < max(rest) <= 1e-4
    assert [plan.phase(step) for step in (0, 99, 100)] == ["transfer", "transfer", "end to end"]
