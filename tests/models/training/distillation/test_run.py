"""A whole distillation of a tiny teacher: it gets nearer, and the difference makes the same student again."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from models.checkpoints.published import load_checkpoint
from models.folders.folder import CheckpointError
from models.training.distillation.config import DistillationConfig
from models.training.distillation.delta import DESCRIPTION, WEIGHTS, assemble, read_student
from models.training.distillation.evaluation import embed, texts_of
from models.training.distillation.objectives import Embedder
from models.training.distillation.task import distill


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, teacher: Path, data: Path, plan: DistillationConfig) -> Path:
    out = tmp_path_factory.mktemp("distilled") / "student"
    assert distill(teacher, data, out, plan, Console(quiet=True))
    return out


def report(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_the_student_gets_nearer_to_its_teacher(made: Path) -> None:
    found = report(made)
    first, last = found["evaluations"][0], found["evaluations"][-1]
    assert last["cosine"] > first["cosine"]
    assert found["losses"][3]["loss"] < found["losses"][0]["loss"]
    assert found["likeness"]["kinds"]["all"]["cosine"] == pytest.approx(last["cosine"], abs=0.05)
    assert (made / "curve.png").stat().st_size > 1_000
    assert "mean cosine" in (made / "README.md").read_text()


def test_the_losses_of_a_seed(made: Path) -> None:
    """Of both phases."""
    losses = report(made)["losses"]
    assert [losses[0]["loss"], losses[-1]["loss"]] == pytest.approx([0.0764883, 0.0101026], rel=1e-3)


def test_teacher_and_difference_make_a_checkpoint_that_reads_longer_texts(made: Path, teacher: Path, tmp_path: Path) -> None:
    assemble(teacher, made, tmp_path / "whole")
    whole = load_checkpoint(tmp_path / "whole")
    assert (whole.max_tokens, whole.config.attention, whole.pooling, whole.untrained) == (200, "hybrid", "mean", False)
    rows = [[2, *range(5, 150), 3], [2, 9, 3]]
    student = Embedder(read_student(made, load_checkpoint(teacher)), "mean")
    assert torch.equal(embed(Embedder(whole.model.encoder, "mean"), rows), embed(student, rows))
    tokens = whole.model.encoder.embeddings.tokens.weight
    assert torch.equal(tokens, load_checkpoint(teacher).model.encoder.embeddings.tokens.weight)


def test_a_difference_with_tensors_missing_is_refused(made: Path, teacher: Path, tmp_path: Path) -> None:
    tensors = load_file(made / WEIGHTS)
    (tmp_path / DESCRIPTION).write_bytes((made / DESCRIPTION).read_bytes())
    with pytest.raises(CheckpointError, match=r"delta\.safetensors is missing"):
        read_student(tmp_path, load_checkpoint(teacher))
    save_file({name: tensor for name, tensor in tensors.items() if "log_gain" not in name}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="log_gain is missing or unexpected"):
        read_student(tmp_path, load_checkpoint(teacher))


def test_texts_of_a_length_are_joined_of_shorter_ones_and_none_is_in_two() -> None:
    rows = [[1, 5, 6, 7, 2], [1, 8, 9, 2], [1, *range(10, 20), 2], [1, 20, 2]]
    assert texts_of(6, rows) == [[1, 5, 6, 7, 8, 2], [1, 10, 11, 12, 13, 2]]
    assert texts_of(100, rows) == []
