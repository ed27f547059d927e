"""The feature maps and changes that come with the repository are what their card says."""

import json
import math
from pathlib import Path

import torch

import models
from export.graphs.decoder_step import states_of
from models.decoder.model import Decoder, DecoderConfig
from models.decoder.window import LongWindow, hybrid
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
    assert (sorted(described["long"]["layers"]), described["long"]["window"]) == ([7, 15, 17, 18, 20, 23, 24], 1_280)


def test_its_state_takes_a_tenth_of_the_cache_of_8192_tokens() -> None:
    described = json.loads((FOLDER / "delta.json").read_text())
    softmax = {"vocab_size": 11, "d_model": 576, "n_heads": 9, "d_feedforward": 8}
    config = DecoderConfig(layers="causal_softmax", n_layers=30, layer_options={"causal_softmax": {"n_kv_heads": 3}}, **softmax)
    with torch.device("meta"):
        long = LongWindow(tuple(described["long"]["layers"]), described["long"]["window"])
        student = hybrid(Decoder(config), described["window"], described["options"], long)
    of_cache = 30 * 8_192 * 2 * 3 * 64 * 4
    assert of_cache / 11 < sum(4 * math.prod(state.shape) for state in states_of(student)) < of_cache / 10


def test_after_the_transfer_every_layer_is_nearer_to_its_teacher_than_its_window_alone() -> None:
    layers = json.loads((FOLDER / TRANSFER).read_text())["layers"]
    assert len(layers) == 30
    assert all(ours < window for ours, window in layers)


def test_the_tuning_brought_its_words_nearer_to_those_of_its_teacher() -> None:
    first, *_, last = json.loads((FOLDER / RUN).read_text())["evaluations"]
    assert last["student_kl"] < 0.8 * first["student_kl"]
    assert last["student_bits_2048"] < last["long_window_bits_2048"]
    assert last["student_bits_8192"] < last["long_window_bits_8192"] < last["window_bits_8192"]


def test_the_card_tells_the_figures_of_the_window_alone_too() -> None:
    card, figures = (FOLDER / "README.md").read_text(), json.loads((FOLDER / FIGURES).read_text())
    ours = {name.removesuffix(STUDENT): bits for name, bits in figures.items() if name.startswith("bits") and name.endswith(STUDENT)}
    assert ours
    for name, bits in ours.items():
        last = max(bits, key=int)
        assert bits[last] < figures[name + WINDOW][last]
        assert f"{bits[last]:.4f} | {figures[name + WINDOW][last]:.4f}" in card
