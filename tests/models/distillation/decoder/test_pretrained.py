"""The feature maps and changes that come with the repository are what their card says."""

import json
from pathlib import Path

import models
from models.distillation.decoder.card import FIGURES, STUDENT, WINDOW
from models.distillation.decoder.tuning import TRANSFER
from models.training.run import RUN

FOLDER = Path(models.__file__).parent / "pretrained" / "smollm2-135m-linear"


def test_the_difference_is_small_and_complete() -> None:
    names = {"delta.json", "delta.safetensors", "README.md", "curve.png", "run.json", "figures.json", "sources.json", TRANSFER}
    assert {file.name for file in FOLDER.iterdir()} == names
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 11_000_000
    described = json.loads((FOLDER / "delta.json").read_text())
    assert (described["window"], described["options"]) == (256, {"n_first": 4, "piece": 255})
    assert described["low_rank"] == {"rank": 16, "scale": 2.0}


def test_after_the_transfer_every_layer_is_nearer_to_its_teacher_than_its_window_alone() -> None:
    layers = json.loads((FOLDER / TRANSFER).read_text())["layers"]
    assert len(layers) == 30
    assert all(ours < window for ours, window in layers)


def test_the_tuning_brought_its_words_nearer_to_those_of_its_teacher() -> None:
    first, *_, last = json.loads((FOLDER / RUN).read_text())["evaluations"]
    assert last["student_kl"] < 0.8 * first["student_kl"]
    assert last["student_bits_2048"] < 1.1 * last["long_window_bits_2048"] < first["student_bits_2048"]


def test_the_card_tells_the_figures_of_the_window_alone_too() -> None:
    card, figures = (FOLDER / "README.md").read_text(), json.loads((FOLDER / FIGURES).read_text())
    ours = {name.removesuffix(STUDENT): bits for name, bits in figures.items() if name.startswith("bits") and name.endswith(STUDENT)}
    assert ours
    for name, bits in ours.items():
        last = max(bits, key=int)
        assert bits[last] < figures[name + WINDOW][last]
        assert f"{bits[last]:.4f} | {figures[name + WINDOW][last]:.4f}" in card
