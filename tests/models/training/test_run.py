"""From a config to a checkpoint folder with its card, by the command."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from models.checkpoints.decoder import load_decoder
from models.training.__main__ import app
from models.training.config import ConfigError, TrainingConfig
from models.training.corpus import Tokens
from models.training.text.evaluation import evaluate
from models.training.text.task import build
from tests.models.training.texts import small_config

PNG = b"\x89PNG\r\n\x1a\n"


def written(config: TrainingConfig, folder: Path, **values: object) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump() | values))
    return file


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two finished runs, by the command."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for layers, weights in (("causal_linear", "fp32"), ("causal_softmax", "bf16")):
        out = folder / layers
        model = small_config().model | {"layers": layers, "n_layers": 1}
        config = small_config(name=layers, model=model, weights=weights)
        file = written(config, folder)
        result = CliRunner().invoke(app, ["train", "--config", str(file), "--data", str(data), "--out", str(out)])
        assert result.exit_code == 0, result.output
        found[layers] = out
    return found


@pytest.mark.parametrize(("layers", "dtype"), [("causal_linear", torch.float32), ("causal_softmax", torch.bfloat16)])
def test_the_result_is_a_checkpoint_that_gives_the_bits_it_states(
    runs: dict[str, Path], tokens: Tokens, layers: str, dtype: torch.dtype
) -> None:
    loaded = load_decoder(runs[layers])
    report = json.loads((runs[layers] / "run.json").read_text())
    assert loaded.eos_token_ids == (tokens.end_of_text,)
    assert loaded.bos_token_id == tokens.end_of_text
    assert loaded.tokenizer_file.read_bytes() == tokens.tokenizer_file.read_bytes()
    stated = report["held_out"]
    assert evaluate(loaded.model, tokens.held_out, end_of_text=0).overall == stated["carried"]["overall"]
    assert evaluate(loaded.model, tokens.held_out, end_of_text=0, context=24).overall == stated["windows"]["overall"]
    assert set(stated["carried"]["packages"]) == {"q0", "q1"}
    rounded = [parameter.to(dtype).float().equal(parameter) for parameter in loaded.model.parameters()]
    assert all(rounded)


def test_the_loss_of_a_seed(runs: dict[str, Path]) -> None:
    losses = json.loads((runs["causal_linear"] / "run.json").read_text())["losses"]
    assert [point["bits_per_byte"] for point in losses] == pytest.approx([3.08094, 2.58889], rel=1e-3)


def test_a_context_beyond_the_learned_positions_is_an_error() -> None:
    shape = {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_feedforward": 8, "layers": "causal_linear", "positions": "learned"}
    values = {"name": "a", "vocab_size": 300, "context": 24, "batch": 1, "learning_rate": 0.1, "max_steps": 1}
    config = TrainingConfig(**values, model={**shape, "n_positions": 23})
    with pytest.raises(ConfigError, match=r"a.yaml: context=24 is more than n_positions=23; shorten one, or enlarge the other"):
        build(config, Path("a.yaml"))
    assert build(config.model_copy(update={"context": 23}), Path("a.yaml")).config.n_positions == 23


def test_the_card_says_what_a_stranger_has_to_know(runs: dict[str, Path]) -> None:
    folder = runs["causal_linear"]
    report, card = json.loads((folder / "run.json").read_text()), (folder / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "apache-2.0"
    assert f"**{report['held_out']['carried']['overall']:.3f}**" in card
    assert "| ISC | 1 | 0.00 |" in card
    for words in (report["hardware"], report["date"], "Intended use", "## Limits", "learning_rate: 0.01"):
        assert words in card
    assert json.loads((folder / "sources.json").read_text())["packages"][0]["name"] == "p0"
    assert (folder / "loss.png").read_bytes().startswith(PNG)
