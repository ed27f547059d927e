"""Decoders as folders: what is written comes back, and what does not fit is an error that says what."""

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.checkpoints.decoder import ImageFormat, load_decoder, save_decoder
from models.decoder.model import Decoder, DecoderConfig
from models.folders.folder import CheckpointError

CONFIG = DecoderConfig(vocab_size=31, d_model=12, n_layers=2, n_heads=3, d_feedforward=20, layers="causal_linear")
CONFIGS = {
    "tied": CONFIG,
    "untied": replace(CONFIG, tied=False, bias=True, norm="layer", positions="sinusoidal"),
    "learned": replace(CONFIG, positions="learned", n_positions=11),
    "hybrid": replace(
        CONFIG, layers=("gated_delta", "sliding_window"), window=7, layer_options={"gated_delta": {"d_value": 5, "kernel": 3}}
    ),
}
TOKENIZER = '{"model": {"type": "BPE"}}'
TOKENS = torch.arange(9).reshape(1, 9)


def save(folder: Path, config: DecoderConfig = CONFIG, **options) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config)
    save_decoder(folder, decoder, tokenizer=TOKENIZER, **options)
    return decoder


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_a_decoder_comes_back_to_the_bit(config: DecoderConfig, tmp_path: Path) -> None:
    saved = save(tmp_path, config)
    loaded = load_decoder(tmp_path)
    assert loaded.config == config
    assert not loaded.model.training
    assert torch.equal(loaded.model(TOKENS)[0], saved(TOKENS)[0])


def test_what_stands_beside_the_weights(tmp_path: Path) -> None:
    save(tmp_path, eos_token_ids=(2, 5), bos_token_id=1, chat_template="{{ messages }}")
    loaded = load_decoder(tmp_path)
    assert loaded.architecture == "AttnserveDecoder"
    assert (loaded.eos_token_ids, loaded.bos_token_id) == ((2, 5), 1)
    assert loaded.tokenizer_file.read_text() == TOKENIZER
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.weights_sha256 == sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()


def test_what_is_optional_may_be_absent_and_does_not_survive_from_before(tmp_path: Path) -> None:
    save(tmp_path, eos_token_ids=(2,), bos_token_id=1, chat_template="{{ messages }}")
    save(tmp_path)
    loaded = load_decoder(tmp_path)
    assert (loaded.eos_token_ids, loaded.bos_token_id, loaded.chat_template) == ((), None, None)


def test_one_end_of_text_may_be_a_number_as_others_write_it(tmp_path: Path) -> None:
    save(tmp_path)
    edit_json(tmp_path / "config.json", lambda values: values.update(eos_token_id=7))
    assert load_decoder(tmp_path).eos_token_ids == (7,)


def test_tied_weights_are_in_the_file_once(tmp_path: Path) -> None:
    save(tmp_path)
    assert "unembedding.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load_decoder(tmp_path).model
    assert loaded.unembedding.weight is loaded.embedding.weight


def edit_json(file: Path, edit: Callable) -> None:
    values = json.loads(file.read_text())
    edit(values)
    file.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda v: v.update(architectures=["GPT2LMHeadModel"]),
            "architecture 'GPT2LMHeadModel' is not supported; supported decoders: AttnserveDecoder",
        ),
        (lambda v: v.pop("architectures"), "has no 'architectures'"),
        (lambda v: v.pop("attnserve_decoder"), "has no 'attnserve_decoder'"),
        (lambda v: v["attnserve_decoder"].update(d_modle=3), "attnserve_decoder has 'd_modle', which is not one of vocab_size, d_model"),
        (lambda v: v["attnserve_decoder"].pop("n_heads"), "attnserve_decoder lacks the field 'n_heads'"),
        (lambda v: v["attnserve_decoder"].update(d_model="12"), "config.json: d_model='12': Input should be a valid integer"),
        (lambda v: v["attnserve_decoder"].update(layers="magic"), "config.json: layers='magic' is not one of"),
        (lambda v: v["attnserve_decoder"].update(layers=["causal_linear"]), "layers has 1 entries for n_layers=2"),
        (lambda v: v["attnserve_decoder"].update(d_feedforward=21), r"has shape \(20, 12\), but config.json makes it \(21, 12\)"),
        (lambda v: v["attnserve_decoder"].update(tied=False), "unembedding.weight is missing from the weights"),
        (lambda v: v.update(eos_token_id=[2, 31]), "eos_token_id=31 is not in the vocabulary, 0 to 30"),
        (lambda v: v.update(bos_token_id="<s>"), "bos_token_id='<s>' is not accepted"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(edit: Callable, message: str, tmp_path: Path) -> None:
    save(tmp_path)
    edit_json(tmp_path / "config.json", edit)
    with pytest.raises(CheckpointError, match=message):
        load_decoder(tmp_path)


# Pixels

IMAGE = ImageFormat(width=4, height=3, level_token_ids=(5, 6, 30), prompts=("zero", "one"))


def test_what_a_decoder_draws_comes_back(tmp_path: Path) -> None:
    save(tmp_path, image=IMAGE)
    assert load_decoder(tmp_path).image == IMAGE
    save(tmp_path)
    assert "image" not in json.loads((tmp_path / "config.json").read_text())
    assert load_decoder(tmp_path).image is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": 0}, "width=0 and height=3 must be whole numbers"),
        ({"height": 2.5}, r"height=2\.5 must be"),
        ({"level_token_ids": [5]}, "2 to 256 different tokens"),
        ({"level_token_ids": [5, 5]}, "2 to 256 different tokens"),
        ({"level_token_ids": [5, "6"]}, "2 to 256 different tokens"),
        ({"level_token_ids": [5, 31]}, "level_token_ids has 31, which is not in the vocabulary, 0 to 30"),
        ({"level_token_ids": 5}, "not iterable"),
        ({"prompts": []}, "must be one or more texts"),
        ({"depth": 3}, "depth"),
    ],
)
def test_an_image_that_cannot_be_drawn_is_an_error(values: dict, message: str, tmp_path: Path) -> None:
    save(tmp_path, image=IMAGE)
    edit_json(tmp_path / "config.json", lambda config: config["image"].update(values))
    with pytest.raises(CheckpointError, match=message):
        load_decoder(tmp_path)


@pytest.mark.parametrize("image", [7, {"width": 4}])
def test_what_is_no_image_is_an_error(image: object, tmp_path: Path) -> None:
    save(tmp_path, image=IMAGE)
    edit_json(tmp_path / "config.json", lambda config: config.update(image=image))
    with pytest.raises(CheckpointError, match=r"image[:=]"):
        load_decoder(tmp_path)
