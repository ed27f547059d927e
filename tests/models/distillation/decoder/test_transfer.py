"""Attention transfer into a tiny decoder: the maps get nearer, a stop changes nothing, and the difference makes the same student again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from models.checkpoints.decoder import load_decoder
from models.decoder.window import hybrid
from models.distillation.decoder.config import TransferConfig
from models.distillation.decoder.delta import assemble, read_student
from models.distillation.decoder.sequences import sequences
from models.distillation.decoder.task import TransferTask, train_maps
from models.distillation.decoder.transfer import record, recording, transfer_error
from models.distillation.delta import DESCRIPTION, WEIGHTS
from models.folders.byte_tokenizer import byte_tokenizer
from models.folders.folder import CheckpointError
from models.training import checkpoints
from models.training.corpus import CorpusError, write_texts
from models.training.trainer import train
from tests.decoders import random_decoder, tiny_decoder
from tests.models.training.texts import SOURCES, documents

EXACT = 1e-10  # float64: the same formula, summed in another order
CONFIG = TransferConfig(window=12, n_first=2, context=64, texts=6, parts=2, evaluations=2, held_out=2, checkpoint_steps=5)
TEACHER = {"layers": "causal_softmax", "n_layers": 2, "n_heads": 4, "layer_options": {"causal_softmax": {"n_kv_heads": 2}}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder(tmp_path_factory.mktemp("teacher") / "tiny", **TEACHER)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder, {"train": documents(("p0",), files=20, seed=0), "held_out": documents(("q0",), files=6, seed=1)}, SOURCES)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, teacher: Path, data: Path) -> Path:
    out = tmp_path_factory.mktemp("maps") / "student"
    assert train_maps(teacher, data, out, CONFIG, Console(quiet=True))
    return out


@torch.no_grad()
def test_the_error_that_is_trained_is_that_of_the_layers_outputs() -> None:
    """For all parts of a text, from the teacher's own inputs: o of the whole layer, less o of softmax attention."""
    whole = random_decoder(**TEACHER).double()
    student, used = (hybrid(whole, CONFIG.window, CONFIG.options).double() for _ in range(2))
    ids = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(0))
    inputs = []
    for block in used.blocks:
        block.layer.to_out = torch.nn.Identity()
    for block in whole.blocks:
        block.layer.register_forward_pre_hook(lambda _, x, named: inputs.append((x[0], named["rotation"])), with_kwargs=True)
    expected = whole(ids)[0]
    student, recorders = recording(student)
    assert torch.equal(student(ids, states=[{}, {}])[0], expected)
    rotary, t = whole.config.rotary, torch.arange(40)[None]
    near = rotary.at(t.clamp_max(CONFIG.window - 1), dtype=torch.float64, lengths=torch.tensor([40]))
    for block, recorder, seen, (x, rotation) in zip(
        used.blocks, recorders, record(student, recorders, ids[0].tolist()), inputs, strict=False
    ):
        o = block.layer(x, rotation=rotation._replace(t=t, near={CONFIG.window: near}))[0].unflatten(-1, (4, -1)).transpose(1, 2)
        errors = (o - seen.o).square().sum((0, 1, 3))
        for part in (slice(12, 13), slice(12, 30), slice(30, 40)):
            assert (transfer_error(recorder.layer, seen, part) - errors[part]).abs().max() <= EXACT * errors.max()


def test_the_maps_get_nearer_to_softmax_attention(made: Path) -> None:
    report = json.loads((made / "run.json").read_text())
    first, last = report["evaluations"][0], report["evaluations"][-1]
    assert last["error"] < 0.95 * first["error"]
    assert first["window_error"] == last["window_error"] > 0
    assert len(report["layers"]) == 2
    assert (made / "curve.png").stat().st_size > 1_000


def test_stopped_and_taken_up_again_it_ends_with_the_same_bits(made: Path, teacher: Path, data: Path, tmp_path: Path) -> None:
    """Stopped between two steps with the same text."""
    task, steps = TransferTask(teacher, data, CONFIG, "student"), iter([False] * 7 + [True])
    assert train(task, tmp_path / "checkpoints", stopping=lambda: next(steps)).step == 7
    again = TransferTask(teacher, data, CONFIG, "student")
    assert train(again, tmp_path / "checkpoints").step == CONFIG.steps
    whole = load_file(made / WEIGHTS)
    assert whole.keys() == again.maps.keys()
    assert all(torch.equal(whole[name], parameter.half()) for name, parameter in again.maps.items())
    with pytest.raises(checkpoints.ResumeError, match="has a run with another config: rate"):
        train_maps(teacher, data, made, replace(CONFIG, rate=1.0), Console(quiet=True))


def test_teacher_and_difference_make_a_checkpoint(made: Path, teacher: Path, tmp_path: Path) -> None:
    assemble(teacher, made, tmp_path / "whole")
    whole, source = load_decoder(tmp_path / "whole"), load_decoder(teacher)
    assert (whole.config.layers, whole.config.window, whole.eos_token_ids) == (("causal_hybrid",) * 2, 12, (10,))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(whole.model(ids)[0], read_student(made, source).eval()(ids)[0])
    assert torch.equal(whole.model.embedding.weight, source.model.embedding.weight)


def test_a_difference_that_does_not_fit_is_refused(made: Path, teacher: Path, tmp_path: Path) -> None:
    other = load_decoder(tiny_decoder(tmp_path / "other", seed=1, **TEACHER))
    with pytest.raises(CheckpointError, match="give the teacher from which it was made"):
        read_student(made, other)
    source, tensors = load_decoder(teacher), load_file(made / WEIGHTS)
    (tmp_path / DESCRIPTION).write_bytes((made / DESCRIPTION).read_bytes())
    with pytest.raises(CheckpointError, match=r"delta\.safetensors is missing"):
        read_student(tmp_path, source)
    save_file({name: tensor for name, tensor in tensors.items() if "phi_q.bias" not in name}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"phi_q\.bias is missing or unexpected"):
        read_student(tmp_path, source)
    save_file({name: tensor[..., :1].contiguous() for name, tensor in tensors.items()}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="has shape"):
        read_student(tmp_path, source)


def test_too_few_long_documents_are_refused(data: Path) -> None:
    with pytest.raises(CorpusError, match="documents of 64 tokens, and 500 are needed"):
        sequences(data, "train", byte_tokenizer(), context=64, n=500)


@pytest.mark.parametrize(("changes", "told"), [({"parts": 0}, "parts=0 must be at least 1"), ({"context": 13}, "context=13 must exceed")])
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(CONFIG, **changes)
