"""What the commands make of broken or hostile folders: one sentence, a status that is not 0, and never a traceback."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from models.training.__main__ import app as training
from service import cli
from service.terminal import errors_printed
from tests.checkpoints import tiny_encoder
from tests.decoders import tiny_decoder
from tests.service.fakes import fake_bundle

DEEP = "[" * 100_000


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command as from a shell, by `attnserve` or `python -m models.training`, and returns the one line that it ends with."""

    def run(command: str, *arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["attnserve", command, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended, errors_printed():
            training() if command in ("train", "distill") else cli.main()
        assert ended.value.code == 1, "a status that scripts see"
        told = [line for line in capsys.readouterr().err.splitlines() if line]
        assert told[-1].startswith("error: ")
        assert len([line for line in told if line.startswith("error: ")]) == 1
        return told[-1]

    return run


def edited(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


ENCODERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a garbage tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"model": 7}'), "tokenizer.json is not a tokenizer"),
    "a tokenizer of pure depth": (lambda folder: (folder / "tokenizer.json").write_text(DEEP), "tokenizer.json is not a tokenizer"),
    "a tokenizer whose pattern has no end": (
        lambda folder: edited(
            folder / "tokenizer.json",
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(?:aa?){20}b"}, "behavior": "Isolated", "invert": False},
        ),
        "tokenizer.json is refused: the pattern '(?:aa?){20}b'",
    ),
    "a tokenizer of another model": (
        lambda folder: (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"type": "WordLevel", "vocab": {"[UNK]": 10**6}, "unk_token": "[UNK]"}})
        ),
        "cannot be exported: IndexError",
    ),
}


@pytest.mark.parametrize("case", ENCODERS)
def test_an_encoder(tmp_path: Path, said: Callable[..., str], case: str) -> None:
    spoil, sentence = ENCODERS[case]
    spoil(tiny_encoder(tmp_path / "encoder"))
    assert sentence in said("export", "--checkpoint", tmp_path / "encoder", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_decoder(tmp_path: Path, said: Callable[..., str]) -> None:
    folder = tiny_decoder(tmp_path / "decoder")
    config = json.loads((folder / "config.json").read_text())
    edited(folder / "config.json", attnserve_decoder=config["attnserve_decoder"] | {"n_layers": 10**9})
    assert "n_layers=1000000000 is above the limit" in said("export", "--checkpoint", folder, "--out", tmp_path / "out")


def test_a_decoder_with_a_chat_template_without_an_end(tmp_path: Path, said: Callable[..., str]) -> None:
    """It would stop the start of the service, after an export of minutes."""
    folder = tiny_decoder(tmp_path / "decoder", chat_template="{{ 'a' * 10 ** 10 }}")
    assert "the chat template was stopped: it" in said("export", "--checkpoint", folder, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (DEEP, "neither YAML nor JSON"),
        ("model: {d_model: 10000000, n_layers: 100, n_heads: 1, d_feedforward: 8, n_positions: 8}", "but this machine"),
        ("model: {d_model: 16, n_layers: 100000, n_heads: 1, d_feedforward: 8, n_positions: 8}", "n_layers=100000 is above the limit"),
    ],
)
def test_the_description_of_an_encoder(tmp_path: Path, said: Callable[..., str], text: str, sentence: str) -> None:
    (tmp_path / "encoder.yaml").write_text(text)
    assert sentence in said("export", "--config", tmp_path / "encoder.yaml", "--out", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"\xff", DEEP.encode(), b'{"\\u001b[2J": 1, "kind": "[/red]"}'])
def test_a_bundle_to_inspect(tmp_path: Path, said: Callable[..., str], content: bytes) -> None:
    (fake_bundle(tmp_path / "bundle") / "manifest.json").write_bytes(content)
    assert "manifest.json" in said("inspect", tmp_path / "bundle", "--graph")


def test_a_folder_for_a_comparison(tmp_path: Path, said: Callable[..., str]) -> None:
    (tmp_path / "file").write_text("no folder")
    assert "file" in said("compare", "--out", tmp_path / "file", "--only", "softmax", "--longest", 64)


CONFIG = {
    "name": "x",
    "model": {"layers": "causal_linear", "d_model": 16, "n_layers": 1, "n_heads": 2, "d_feedforward": 32, "positions": "none"},
    **{"vocab_size": 300, "context": 8, "batch": 2, "learning_rate": 0.01, "max_steps": 2},
}


def data_of_tokens(data: Path) -> Path:
    """As `open_tokens` leaves it, of 64 tokens."""
    folder = data / "tokens-300"
    folder.mkdir(parents=True)
    (data / "sources.json").write_text("{}")
    np.arange(64, dtype=np.uint16).tofile(folder / "train.bin")
    np.arange(8, dtype=np.uint16).tofile(folder / "held_out.bin")
    (folder / "tokenizer.json").write_text("{}")
    held_out = [{"package": "p", "file": "f", "bytes": 8, "tokens": 8}]
    (folder / "index.json").write_text(json.dumps({"end_of_text": 0, "train": {"bytes": 64, "sha256": ""}, "held_out": held_out}))
    return folder


TRAINING: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a deep config": (lambda config, tokens: config.write_text(DEEP), "is not YAML"),
    "a model beyond memory": (
        lambda config, tokens: config.write_text(yaml.safe_dump(CONFIG | {"model": CONFIG["model"] | {"d_model": 2**22}})),
        "but this machine",
    ),
    "an index that is a list": (lambda config, tokens: (tokens / "index.json").write_text("[]"), "failed: TypeError"),
    "a pipe of tokens": (lambda config, tokens: pipe(tokens / "train.bin"), "train.bin is missing or is not a regular file"),
    "tokens of another vocabulary": (
        lambda config, tokens: np.full(64, 999, np.uint16).tofile(tokens / "train.bin"),
        "train.bin has a token 999",
    ),
}


@pytest.mark.parametrize("case", TRAINING)
def test_a_folder_to_train_on(tmp_path: Path, said: Callable[..., str], case: str) -> None:
    spoil, sentence = TRAINING[case]
    config, tokens = tmp_path / "config.yaml", data_of_tokens(tmp_path / "data")
    config.write_text(yaml.safe_dump(CONFIG))
    spoil(config, tokens)
    assert sentence in said("train", "--config", config, "--data", tmp_path / "data", "--out", tmp_path / "out")


def test_a_run_to_go_on_with(tmp_path: Path, said: Callable[..., str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    data_of_tokens(tmp_path / "data")
    (tmp_path / "out" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "out" / "run.json").write_text(DEEP)
    assert "run.json cannot be read" in said("train", "--config", config, "--data", tmp_path / "data", "--out", tmp_path / "out")
