"""The trained decoders that come with the repository are what their cards say."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import models
from models.decoder_checkpoint import load_decoder
from models.training.corpus import TokenDocument
from models.training.evaluation import evaluate

PRETRAINED = Path(models.__file__).parent / "pretrained"
PYTHON = sorted(PRETRAINED.glob("python-*"))


def test_there_is_one_of_linear_attention_and_one_that_forgets() -> None:
    assert {folder.name for folder in PYTHON} == {"python-linear", "python-gated-delta"}


@pytest.mark.parametrize("folder", PYTHON, ids=lambda folder: folder.name)
def test_a_folder_is_small_and_complete(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) < 16_000_000
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "loss.png", "run.json", "sources.json"} == {
        file.name for file in folder.iterdir()
    }
    report = json.loads((folder / "run.json").read_text())
    assert f"{report['held_out']['carried']['overall']:.3f}" in (folder / "README.md").read_text()


@pytest.mark.parametrize("folder", PYTHON, ids=lambda folder: folder.name)
def test_it_reads_python_that_it_has_not_seen_far_better_than_chance(folder: Path) -> None:
    checkpoint = load_decoder(folder, dtype=torch.float32)
    text = Path(__file__).read_text()
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    document = TokenDocument(package="here", file=Path(__file__).name, tokens=torch.tensor(tokens).numpy(), size_bytes=len(text.encode()))
    end = checkpoint.bos_token_id
    assert end is not None
    bits = evaluate(checkpoint.model, [document], end_of_text=end).overall
    untrained = torch.log2(torch.tensor(float(checkpoint.config.vocab_size))).item() * len(tokens) / len(text)
    assert bits < 0.8 * untrained
