"""Pictures as text: what is written is what scikit-learn has, and training on it ends in a checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console
from sklearn.datasets import load_digits
from tokenizers import Tokenizer

from models.checkpoints.decoder import load_decoder
from models.training.corpus import TextDocument, Tokens, open_tokens, write_texts
from models.training.pictures import digits
from models.training.start import train_decoder
from tests.models.training.texts import small_config

LETTERS = "abcd"


@pytest.fixture(scope="module")
def splits() -> dict[str, list[TextDocument]]:
    return digits.pictures()


def levels(document: TextDocument) -> np.ndarray:
    return np.array([digits.LETTERS.index(letter) for letter in document.text[1:]]).reshape(digits.SIDE, digits.SIDE)


# The digits


def test_a_tenth_of_the_originals_is_held_out_and_all_are_there(splits: dict[str, list[TextDocument]]) -> None:
    originals = {split: {document.file.partition("-")[0] for document in documents} for split, documents in splits.items()}
    assert {split: len(found) for split, found in originals.items()} == {"train": 1617, "held_out": 180}
    assert originals["train"].isdisjoint(originals["held_out"])
    assert len(splits["train"]) == digits.VARIANTS * 1617
    assert len(splits["held_out"]) == 180
    assert {document.package for document in splits["held_out"]} == {f"digit {digit}" for digit in range(10)}


def test_the_straight_picture_is_the_original_enlarged(splits: dict[str, list[TextDocument]]) -> None:
    """Each original pixel, seen through the middle of the 3x3 that it became, and nothing in the margin."""
    pixels, _ = load_digits(return_X_y=True)
    for document in splits["held_out"]:
        picture, original = levels(document), pixels[int(document.file.partition("-")[0])].reshape(8, 8)
        middles = picture[3:27:3, 3:27:3]
        assert np.abs(middles - original * 15 / 16).max() <= 1
        assert not picture[0].any()
        assert not picture[:, -1].any()


# Training on pictures, in small


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of 3x2 pixels, two prompts: "0" is dark, "1" is bright."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)

    def pictures(n: int) -> list[TextDocument]:
        drawn = [(i % 2, random.integers(2, size=6) + 2 * (i % 2)) for i in range(n)]
        texts = [f"{prompt}{''.join(LETTERS[level] for level in picture)}" for prompt, picture in drawn]
        return [TextDocument(package=f"digit {text[0]}", file=str(i), text=text) for i, text in enumerate(texts)]

    splits = {"train": pictures(200), "held_out": pictures(10)}
    sources = digits.sources(splits) | {"image": {"width": 3, "height": 2, "letters": LETTERS, "prompts": ["0", "1"]}}
    write_texts(folder, splits, sources)
    return folder


@pytest.fixture(scope="module")
def tokens(data: Path) -> Tokens:
    return open_tokens(data, vocab_size=257)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small_config().model | {"positions": "sinusoidal"}
    config = small_config(name="tiny-pictures", model=model, vocab_size=257, context=8, batch=16, max_steps=120)
    out = tmp_path_factory.mktemp("trained")
    file = out.with_name("pictures.yaml")
    file.write_text(yaml.safe_dump(config.model_dump()))
    assert train_decoder(file, data, out, Console(quiet=True))
    return out


def test_a_data_folder_of_pictures_says_what_they_are(tokens: Tokens) -> None:
    assert tokens.image is not None
    assert (tokens.image.width, tokens.image.height, tokens.image.prompts) == (3, 2, ("0", "1"))
    assert tokens.document == 8
    assert {len(document.tokens) for document in tokens.held_out} == {8}
    first, *pixels, last = tokens.held_out[1].tokens.tolist()
    assert Tokenizer.from_file(str(tokens.tokenizer_file)).decode([first]) == "1"
    assert set(pixels) <= set(tokens.image.level_token_ids)
    assert last == tokens.end_of_text


def test_the_checkpoint_says_what_it_draws(trained: Path, tokens: Tokens) -> None:
    loaded = load_decoder(trained)
    assert loaded.image == tokens.image
    tokenizer = Tokenizer.from_file(str(loaded.tokenizer_file))
    assert tokenizer.encode("1").ids == [tokens.end_of_text, tokenizer.token_to_id("1")], "as every picture began in training"


def test_the_card_of_pictures(trained: Path) -> None:
    card = (trained / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["license"] == "apache-2.0"
    for words in (
        "draws 3x2 pictures",
        "bits per pixel (bits/dim)",
        "| digit 1 |",
        "CC BY 4.0",
        "BSD-3-Clause",
        "/v1/images/generations",
        "200 pictures to train on, 10 held out",
        "learning_rate: 0.01",
    ):
        assert words in card
    assert "Python" not in card
