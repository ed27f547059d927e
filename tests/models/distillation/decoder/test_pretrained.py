"""The feature maps that come with the repository are what their card says."""

import json
from pathlib import Path

import models
from models.distillation.decoder.card import FIGURES, STUDENT, WINDOW
from models.training.run import RUN

FOLDER = Path(models.__file__).parent / "pretrained" / "smollm2-135m-linear"


def test_the_difference_is_small_and_complete() -> None:
    names = {"delta.json", "delta.safetensors", "README.md", "curve.png", "run.json", "figures.json", "sources.json"}
    assert {file.name for file in FOLDER.iterdir()} == names
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8_000_000
    described = json.loads((FOLDER / "delta.json").read_text())
    assert (described["window"], described["options"]) == (256, {"n_first": 4, "piece": 255})


def test_every_layer_is_nearer_to_its_teacher_than_its_window_alone() -> None:
    layers = json.loads((FOLDER / RUN).read_text())["layers"]
    assert len(layers) == 30
    assert all(ours < window for ours, window in layers)


def test_the_card_tells_the_figures_of_the_window_alone_too() -> None:
    """Bits per byte are hardly better than those of the window alone."""
    card, figures = (FOLDER / "README.md").read_text(), json.loads((FOLDER / FIGURES).read_text())
    ours = {name.removesuffix(STUDENT): bits for name, bits in figures.items() if name.startswith("bits") and name.endswith(STUDENT)}
    assert len(ours) == 2
    for name, bits in ours.items():
        assert bits["2048"] < 1.01 * figures[name + WINDOW]["2048"]
        assert f"{bits['2048']:.4f} | {figures[name + WINDOW]['2048']:.4f}" in card
