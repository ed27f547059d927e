"""From a config to a checkpoint folder; a run that was stopped ends with the same weights as one that was not."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from models.encoder_decoder.checkpoint import load_encoder_decoder
from models.encoder_decoder.search import SearchOutputs, greedy
from models.training.__main__ import app
from models.training.checkpoints import ResumeError
from models.training.config import ConfigError, read_config
from models.training.number_words.config import NumberWordsConfig
from models.training.number_words.evaluation import exact
from models.training.number_words.task import NumberWordsTask, build, exact_matches
from models.training.number_words.tokens import character_tokenizer
from models.training.number_words.words import Example
from models.training.start import train_number_words
from models.training.trainer import train

PNG = b"\x89PNG\r\n\x1a\n"
CONFIG = {
    "name": "tiny",
    "kind": "recurrent",
    "model": {"d_embedding": 6, "d_encoder": 6, "d_state": 6, "d_hidden": 6},
    "languages": ["en", "de"],
    "max_digits": 3,
    "batch": 8,
    "max_steps": 24,
    "learning_rate": 0.01,
    "evaluations": 2,
    "evaluation_size": 6,
    "checkpoint_steps": 5,
    "threads": 1,
}


def written(folder: Path, **changes: object) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG | changes))
    return file


@pytest.fixture(scope="module", params=["recurrent", "transformer"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    shape = {"d_model": 8, "n_heads": 2, "d_feedforward": 8, "n_encoder_layers": 1, "n_decoder_layers": 1}
    papers = {"positions": "sinusoidal", "norm": "post", "activation": "relu"}
    changes = {} if request.param == "recurrent" else {"kind": "transformer", "model": shape | papers}
    config = str(written(folder, **changes))
    result = CliRunner().invoke(app, ["number-words", "--config", config, "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    return folder / "out"


def test_the_result_is_a_checkpoint_with_what_it_states(finished: Path) -> None:
    report = json.loads((finished / "run.json").read_text())
    model = load_encoder_decoder(finished).model
    assert sum(parameter.numel() for parameter in model.parameters()) == report["parameters"]
    config = NumberWordsConfig.model_validate(report["config"])
    assert exact_matches(model, character_tokenizer(), config) == report["exact_matches"]
    assert [point["step"] for point in report["evaluations"]] == [12, 24]
    assert [point["step"] for point in report["losses"]] == [20]
    card = (finished / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["language"] == ["en", "de"]
    for words in ("| German |", "117, 142", "held out", "## Limits", report["hardware"]):
        assert words in card
    assert (finished / "loss.png").read_bytes().startswith(PNG)


def test_the_loss_of_a_seed(finished: Path) -> None:
    report = json.loads((finished / "run.json").read_text())
    expected = {"recurrent": 3.44628, "transformer": 3.40035}[report["config"]["kind"]]
    assert [point["loss"] for point in report["losses"]] == pytest.approx([expected], rel=1e-3)


def test_the_same_command_on_a_finished_run_changes_no_weight(finished: Path, tmp_path: Path) -> None:
    before = (finished / "model.safetensors").read_bytes()
    config = json.loads((finished / "run.json").read_text())["config"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert train_number_words(tmp_path / "config.yaml", finished, Console(quiet=True))
    assert (finished / "model.safetensors").read_bytes() == before
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"batch": 9}))
    with pytest.raises(ResumeError, match="another config: batch"):
        train_number_words(tmp_path / "config.yaml", finished, Console(quiet=True))


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Between two checkpoints. A run that is killed: training/test_trainer.py."""
    torch.set_num_threads(1)
    file = written(tmp_path)
    config, ends, halted = read_config(file, NumberWordsConfig), {}, iter([False] * 12 + [True])
    train(NumberWordsTask(config, file), tmp_path / "stopped", stopping=lambda: next(halted))
    for name in ("stopped", "whole"):
        assert train(NumberWordsTask(config, file), tmp_path / name).step == 24
        ends[name] = load_file(tmp_path / name / "step-000024" / "model.safetensors")
    assert all(tensor.equal(ends["whole"][name]) for name, tensor in ends["stopped"].items())


def test_exact_means_every_digit_and_the_end() -> None:
    tokenizer = character_tokenizer()
    model = build(NumberWordsConfig.model_validate(CONFIG), Path("config.yaml"), tokenizer)
    with torch.no_grad():  # writes 1, 1, 1, 1 whatever it reads
        model.to_logits.weight.zero_()
        model.to_logits.bias.zero_()
        model.to_logits.bias[tokenizer.token_to_id("1")] = 1
    numbers = [Example("en", number, "one") for number in (1, 11, 111)]
    assert exact(model, tokenizer, numbers, greedy) == [False, False, False]
    written = torch.tensor([[tokenizer.token_to_id("1"), model.config.end_token_id, model.config.end_token_id]])
    assert exact(model, tokenizer, numbers, lambda model, source, mask: SearchOutputs(written.expand(len(source), -1), None)) == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"languages": ["en", "tlh"]}, "'tlh' is not one of en, de"), ({"max_digits": 12}, "max_digits"), ({"kind": "cnn"}, "kind")],
)
def test_a_config_that_cannot_be_run_is_named(changes: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(written(tmp_path, **changes), NumberWordsConfig)
