"""A decoder with windows and feature maps is rebuilt from its teacher and the difference; the shipped one is what its card says."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from export.graphs.decoder_step import states_of
from models.checkpoints.decoder import load_decoder
from models.decoder.model import Decoder, DecoderConfig
from models.decoder.window import LongWindow, hybrid
from models.folders.folder import CheckpointError
from models.training.distillation.decoder_delta import assemble_decoder, read_student
from models.training.distillation.delta import DESCRIPTION, WEIGHTS, fingerprint_of
from tests.decoders import tiny_decoder

FOLDER = Path(models.__file__).parent / "pretrained" / "smollm2-135m-linear"
TEACHER = {"layers": "causal_softmax", "n_layers": 2, "n_heads": 4, "layer_options": {"causal_softmax": {"n_kv_heads": 2}}}
CHANGED = "blocks.1.layer.to_q"
DESCRIBED = {"teacher": "tiny", "window": 12, "options": {"n_first": 2, "piece": 11}, "long": {"layers": [1], "window": 24}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder(tmp_path_factory.mktemp("teacher") / "tiny", **TEACHER)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Path:
    """A difference with maps in one layer, a longer window in the other, and a low-rank change."""
    folder, source = tmp_path_factory.mktemp("delta"), load_decoder(teacher).model
    student = hybrid(source, 12, DESCRIBED["options"], LongWindow((1,), 24))
    torch.manual_seed(0)
    kept = {name: torch.randn_like(p).half() for name, p in student.named_parameters() if ".phi_q." in name or ".phi_k." in name}
    factors = {f"{CHANGED}.down": torch.randn(2, 16).half(), f"{CHANGED}.up": torch.randn(16, 2).half()}
    save_file(kept | factors, folder / WEIGHTS)
    described = DESCRIBED | {"teacher_sha256": fingerprint_of(source), "low_rank": {"rank": 2, "scale": 2.0}}
    (folder / DESCRIPTION).write_text(json.dumps(described))
    return folder


def test_teacher_and_difference_make_a_checkpoint(made: Path, teacher: Path, tmp_path: Path) -> None:
    assemble_decoder(teacher, made, tmp_path / "whole")
    whole, source, delta = load_decoder(tmp_path / "whole"), load_decoder(teacher), load_file(made / WEIGHTS)
    assert (whole.config.layer_names, whole.config.window, whole.eos_token_ids) == (("causal_hybrid", "sink_window"), 12, (10,))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(whole.model(ids)[0], read_student(made, source).eval()(ids)[0])
    weights, old = dict(whole.model.named_parameters()), dict(source.model.named_parameters())
    product = 2.0 * delta[f"{CHANGED}.up"].float() @ delta[f"{CHANGED}.down"].float()
    torch.testing.assert_close(weights[f"{CHANGED}.weight"], old[f"{CHANGED}.weight"] + product)
    assert all(torch.equal(weights[name], tensor) for name, tensor in old.items() if name != f"{CHANGED}.weight")
    assert all(torch.equal(weights[name], tensor.float()) for name, tensor in delta.items() if ".phi_" in name)


def test_a_difference_that_does_not_fit_is_refused(made: Path, teacher: Path, tmp_path: Path) -> None:
    source, tensors, described = load_decoder(teacher), load_file(made / WEIGHTS), json.loads((made / DESCRIPTION).read_text())
    with pytest.raises(CheckpointError, match="give the teacher from which it was made"):
        read_student(made, load_decoder(tiny_decoder(tmp_path / "other", seed=1, **TEACHER)))
    with pytest.raises(CheckpointError, match=r"delta\.safetensors is missing"):
        read_student(tmp_path, source)
    up = tensors[f"{CHANGED}.up"]
    for words, changed, told in (
        (r"phi_q\.bias is missing or unexpected", {name: x for name, x in tensors.items() if "phi_q.bias" not in name}, described),
        ("phi_q.* has shape", {name: x[..., :1].contiguous() if ".phi_" in name else x for name, x in tensors.items()}, described),
        (r"to_q\.up is missing", {name: x for name, x in tensors.items() if name != f"{CHANGED}.up"}, described),
        ("only one of them has low-rank changes", tensors, {key: x for key, x in described.items() if key != "low_rank"}),
        ("do not fit a projection of shape", tensors | {f"{CHANGED}.up": up[:-1].contiguous()}, described),
        ("to_x is not a projection", {name.replace("to_q", "to_x"): x for name, x in tensors.items()}, described),
        ("does not describe a student of this teacher", tensors, described | {"long": {"layers": [1]}}),
    ):
        save_file(changed, tmp_path / WEIGHTS)
        (tmp_path / DESCRIPTION).write_text(json.dumps(told))
        with pytest.raises(CheckpointError, match=words):
            read_student(tmp_path, source)


def test_the_shipped_difference_is_small_and_its_state_a_tenth_of_the_cache_of_8192_tokens() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 11_000_000
    described = json.loads((FOLDER / "delta.json").read_text())
    softmax = {"vocab_size": 11, "d_model": 576, "n_heads": 9, "d_feedforward": 8}
    config = DecoderConfig(layers="causal_softmax", n_layers=30, layer_options={"causal_softmax": {"n_kv_heads": 3}}, **softmax)
    with torch.device("meta"):
        long = LongWindow(tuple(described["long"]["layers"]), described["long"]["window"])
        student = hybrid(Decoder(config), described["window"], described["options"], long)
    of_cache = 30 * 8_192 * 2 * 3 * 64 * 4
    assert of_cache / 11 < sum(4 * math.prod(state.shape) for state in states_of(student)) < of_cache / 10
