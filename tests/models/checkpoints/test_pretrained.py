"""The trained decoders that come with the repository are what their cards say."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import models
from models.checkpoints.decoder import load_decoder
from models.encoder_decoder.checkpoint import load_encoder_decoder
from models.encoder_decoder.search import beam, greedy
from models.training.corpus import TokenDocument
from models.training.number_words.evaluation import exact, held_out_numbers
from models.training.text.evaluation import evaluate

PRETRAINED = Path(models.__file__).parent / "pretrained"
PYTHON = sorted(PRETRAINED.glob("python-*"))


def test_the_digits_are_pictures_and_their_card_shows_them() -> None:
    folder = PRETRAINED / "digits"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 16_000_000
    image = load_decoder(folder).image
    assert image is not None
    assert (image.width, image.height, image.prompts) == (28, 28, tuple("0123456789"))
    card = (folder / "README.md").read_text()
    assert all(f"({picture})" in card and (folder / picture).is_file() for picture in ("samples.png", "loss.png"))
    report = json.loads((folder / "run.json").read_text())
    assert f"{report['held_out']['carried']['overall']:.3f}" in card


def test_there_is_one_of_linear_attention_and_one_that_forgets() -> None:
    assert {folder.name for folder in PYTHON} == {"python-linear", "python-gated-delta"}


@pytest.mark.parametrize("folder", PYTHON, ids=lambda folder: folder.name)
def test_a_folder_is_small_and_complete(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) < 16_000_000
    weights = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert weights | {"README.md", "loss.png", "run.json", "sources.json"} == {file.name for file in folder.iterdir()}
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


@pytest.mark.parametrize("how", ["greedy", pytest.param("beam", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("name", "numbers"), [("number-words", 3), ("number-words-transformer", 3), ("number-words-english", 30)])
def test_number_words_that_were_held_out_become_their_digits(name: str, numbers: int, how: str) -> None:
    """So many numbers of each language and magnitude; the card's bar is 99 %."""
    folder = PRETRAINED / name
    checkpoint, report = load_encoder_decoder(folder), json.loads((folder / "run.json").read_text())
    search = greedy if how == "greedy" else partial(beam, width=4)
    magnitudes = range(3, report["config"]["max_digits"] + 1)
    cells = [(n_digits, language) for language in report["config"]["languages"] for n_digits in magnitudes]
    sample = [example for cell in cells for example in held_out_numbers(*cell, numbers=numbers)]
    right = exact(checkpoint.model, Tokenizer.from_file(str(checkpoint.tokenizer_file)), sample, search)
    assert sum(right) >= 0.99 * len(sample) > 100
    stated = report["exact_matches"][how]
    assert stated["all"] >= 0.99
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4_000_000
