"""A file that describes an encoder becomes a checkpoint folder, and what it cannot be is said with value, choices and next step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.checkpoints.description import build_encoder
from models.checkpoints.published import load_checkpoint
from models.folders.folder import WEIGHTS, CheckpointError
from tests.checkpoints import tiny_tokenizer

EXAMPLE = Path(__file__).parents[3] / "models" / "configs" / "encoder.yaml"
SHAPE = {"attention": "vq", "attention_options": {"n_codes": 5}, "d_model": 12, "n_layers": 2, "n_heads": 3, "d_feedforward": 8}
MODEL = {**SHAPE, "n_positions": 20}
IDS = torch.tensor([[5, 3, 8, 1, 1, 9]])


def described(folder: Path, **keys: Any) -> Path:
    file = folder / "small.json"
    file.write_text(json.dumps({"model": MODEL, **keys}))
    return file


def vector(folder: Path, **how: Any) -> torch.Tensor:
    with torch.no_grad():
        return load_checkpoint(folder, **how).model(IDS, torch.ones_like(IDS)).embedding


def test_the_example_is_one(tmp_path: Path) -> None:
    build_encoder(EXAMPLE, tmp_path / "built")
    built = load_checkpoint(tmp_path / "built")
    assert (built.kind, built.config.attention, built.pooling, built.untrained) == ("encoder", "bigbird", "mean", True)
    assert built.config.vocab_size == 256
    assert built.max_tokens == 1024


def test_weights_are_drawn_from_the_seed_and_survive_the_folder(tmp_path: Path) -> None:
    """What a layer has drawn beside its parameters too, a codebook here."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_encoder(described(tmp_path, seed=seed), tmp_path / name)
    assert torch.equal(vector(tmp_path / "a"), vector(tmp_path / "b"))
    assert not torch.allclose(vector(tmp_path / "a"), vector(tmp_path / "c"))
    assert vector(tmp_path / "a", dtype=torch.float64).dtype == torch.float64


def test_shared_layers_survive_the_folder(tmp_path: Path) -> None:
    model = {**SHAPE, "n_positions": 20, "shared_layers": True, "d_embedding": 5}
    build_encoder(described(tmp_path, model=model), tmp_path / "a")
    encoder = load_checkpoint(tmp_path / "a").model.encoder
    assert encoder.blocks[0] is encoder.blocks[1]
    assert encoder.embeddings.tokens.weight.shape[1] == 5


def test_weights_that_are_given_are_taken_and_called_trained(tmp_path: Path) -> None:
    build_encoder(described(tmp_path, seed=1), tmp_path / "a")
    build_encoder(described(tmp_path, weights=f"a/{WEIGHTS}", pooling="max"), tmp_path / "b")
    again = load_checkpoint(tmp_path / "b")
    assert (again.untrained, again.pooling) == (False, "max")
    first = load_checkpoint(tmp_path / "a").model.encoder.state_dict()
    assert all(torch.equal(first[name], tensor) for name, tensor in again.model.encoder.state_dict().items())


def test_a_tokenizer_comes_from_a_folder_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    tiny_tokenizer().save(str(tmp_path / "words" / "tokenizer.json"))
    build_encoder(described(tmp_path, tokenizer="words"), tmp_path / "built")
    built = load_checkpoint(tmp_path / "built")
    assert built.config.vocab_size == tiny_tokenizer().get_vocab_size()
    assert built.tokenizer_file.read_text() == tiny_tokenizer().to_str()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model": {**MODEL, "attention": "softmaxx"}}, r"small.json: attention='softmaxx' is not one of softmax, narrow, .*, flash"),
        ({"model": {**MODEL, "attention": "delta"}}, "attention='delta' is not one of softmax"),
        ({"model": {**MODEL, "attention_options": {"codes": 3}}}, r"attention_options of vq has 'codes', which is not one of .*n_codes"),
        ({"model": {**MODEL, "attention_options": {"n_codes": 0}}}, r"attention vq with \{'n_codes': 0\}: n_codes=0"),
        ({"model": {**MODEL, "attention_options": {"n_codes": "many"}}}, r"attention vq with \{'n_codes': 'many'\}: "),
        ({"model": {**MODEL, "d_model": "wide"}}, r"d_model: Input should be a valid integer.* \(is 'wide'\)"),
        ({"model": {**MODEL, "n_heads": 5}}, "d_model=12 is not divisible by n_heads=5"),
        ({"model": {**MODEL, "norm": "both"}}, r"norm: Input should be 'post' or 'pre' \(is 'both'\)"),
        ({"model": {**MODEL, "depth": 3}}, "'depth' is not a field of an encoder; the fields are vocab_size, d_model, n_layers"),
        ({"model": SHAPE}, "n_positions is missing"),
        ({"model": {**MODEL, "vocab_size": 9}}, "vocab_size=9 follows from the tokenizer; remove this key"),
        ({"pooling": "sum"}, r"pooling: Input should be 'cls', 'mean'.* \(is 'sum'\)"),
        ({"heads": 3}, r"heads: Extra inputs are not permitted \(is 3\); the keys are model, tokenizer, pooling"),
        ({"tokenizer": "nowhere"}, "tokenizer='nowhere' is neither `bytes` nor a folder with a tokenizer.json"),
        ({"weights": "nowhere.safetensors"}, "nowhere.safetensors' is not a safetensors file .*; without `weights` the weights are random"),
    ],
)
def test_what_cannot_be_is_refused_with_the_value_and_the_choices(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        build_encoder(described(tmp_path, **keys), tmp_path / "built")
    assert not (tmp_path / "built").exists()


def test_a_file_that_is_missing_or_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere.yaml is missing; models/configs/encoder.yaml is an example"):
        build_encoder(tmp_path / "nowhere.yaml", tmp_path / "built")
    (tmp_path / "broken.yaml").write_text("model: {")
    with pytest.raises(CheckpointError, match=r"broken.yaml is neither YAML nor JSON"):
        build_encoder(tmp_path / "broken.yaml", tmp_path / "built")


def test_its_attention_is_not_swapped(tmp_path: Path) -> None:
    build_encoder(described(tmp_path), tmp_path / "a")
    with pytest.raises(CheckpointError, match="attention='linear' cannot replace the encoder's vq"):
        load_checkpoint(tmp_path / "a", attention="linear")
