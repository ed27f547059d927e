"""The softmax form of an encoder, and which checkpoints say that short texts have it."""

import json
from pathlib import Path

import pytest
import torch

from models.checkpoints.published import load_checkpoint
from models.encoder.model import Encoder, EncoderConfig
from models.encoder.softmax import softmax_of
from models.folders.folder import CheckpointError
from models.training.distillation.delta import SOFTMAX_TOKENS, softmax_tokens
from models.training.distillation.student import with_attention
from tests.bundles import tiny_hybrid_checkpoint
from tests.checkpoints import tiny_encoder

TEACHERS = 64  # tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hybrid_checkpoint(tmp_path_factory.mktemp("hybrid") / "student")


@torch.no_grad()
def test_a_short_text_has_the_teachers_bits(folder: Path) -> None:
    teacher, student = load_checkpoint(folder.with_name("student-teacher")), load_checkpoint(folder)
    short = student.short_form()
    assert short is not None
    assert (short.max_tokens, short.config.attention, short.config.n_positions) == (TEACHERS, "softmax", TEACHERS)
    assert short.model.pooling == student.model.pooling
    for N in (1, 17, TEACHERS):
        ids = torch.randint(5, 40, (2, N))
        wanted = teacher.model(ids, torch.ones_like(ids))
        for got, want in zip(short.model(ids, torch.ones_like(ids)), wanted, strict=True):
            assert (got is None and want is None) or torch.equal(got, want), "outputs that neither has are None"
        assert torch.equal(student.model(ids, torch.ones_like(ids))[0], wanted[0]) == (N == 1), "it is the student's own path beyond"
    with pytest.raises(ValueError, match="N=65 tokens"):
        short.model(torch.ones(1, 65, dtype=torch.long), torch.ones(1, 65, dtype=torch.long))


def test_the_weights_are_shared(folder: Path) -> None:
    student = load_checkpoint(folder).model.encoder
    short = softmax_of(student, TEACHERS)
    assert short.blocks[0].attention.to_q.weight.data_ptr() == student.blocks[0].attention.to_q.weight.data_ptr()
    assert not short.training


def test_a_student_with_other_weights_or_no_longer_texts_has_none(tmp_path: Path) -> None:
    teacher = load_checkpoint(tiny_encoder(tmp_path))
    student = with_attention(teacher, "hybrid", {"block": 8}, 200)
    assert softmax_tokens(student, teacher) == TEACHERS < SOFTMAX_TOKENS
    assert softmax_tokens(with_attention(teacher, "hybrid", {"block": 8}, TEACHERS), teacher) is None
    with torch.no_grad():
        student.blocks[1].feedforward.up.weight[0, 0] += 1e-3
    assert softmax_tokens(student, teacher) is None


def test_what_cannot_be_softmax_attention_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n_positions=300 exceeds the 200"):
        softmax_of(load_checkpoint(folder).model.encoder, 300)
    narrow = Encoder(EncoderConfig(vocab_size=9, d_model=8, n_heads=2, n_layers=1, d_feedforward=8, n_positions=9, attention="narrow"))
    with pytest.raises(ValueError, match="attention='narrow' has no"):
        softmax_of(narrow, 4)
    for tokens, said in ((200, "leaves no longer text for n_positions=200"), (0, "is not accepted"), ("x", "is not accepted")):
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text()) | {"softmax_tokens": tokens}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=said):
            load_checkpoint(tmp_path)


def test_checkpoints_without_the_field_have_none(tmp_path: Path) -> None:
    assert load_checkpoint(tiny_encoder(tmp_path)).short_form() is None
