"""Attention maps of a text, from a checkpoint to files and the terminal."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from export.contract import LONGEST_ATTENTION
from export.errors import ExportError
from export.maps.heatmaps import Maps, draw, on_terminal, picked, visible
from export.maps.of_text import maps_of_checkpoint
from service.cli import app
from tests.checkpoints import N_HEADS, N_LAYERS, tiny_encoder
from tests.decoders import tiny_decoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def test_an_encoder_has_a_map_for_every_layer_and_head(encoder: Path) -> None:
    maps = maps_of_checkpoint(encoder, "the cat")
    assert maps.tokens == ("[CLS]", "the", "cat", "[SEP]")
    assert maps.layers == ("softmax",) * N_LAYERS
    assert [A.shape for A in maps.A] == [(N_HEADS, 4, 4)] * N_LAYERS
    assert all(np.allclose(A.sum(-1), 1, atol=1e-5) for A in maps.A)


def test_a_decoder_has_causal_ones_and_its_tokens_are_pieces_of_the_text(decoder: Path) -> None:
    maps = maps_of_checkpoint(decoder, "a b\n")
    assert maps.tokens == ("a", " ", "b", "\n")
    assert not np.triu(maps.A[0], 1).any()


@pytest.mark.parametrize("text", ["", "a" * (LONGEST_ATTENTION + 1)])
def test_texts_that_cannot_be_drawn_are_refused(decoder: Path, text: str) -> None:
    with pytest.raises(ExportError, match=f"the text has {len(text)} tokens, but maps are drawn of 1 to 256"):
        maps_of_checkpoint(decoder, text)


def test_an_encoder_takes_no_more_tokens_than_it_has_positions(encoder: Path) -> None:
    with pytest.raises(ExportError, match=r"the text has \d+ tokens, but maps are drawn of 1 to 64"):
        maps_of_checkpoint(encoder, "cat " * 80)


MAPS = Maps(
    ("x", "y"), ("softmax", "delta"), (np.array([[[1, 0], [0.25, 0.75]]], np.float32), np.array([[[2, 0], [-1, 1]]] * 3, np.float32))
)


def test_one_map_is_picked_or_the_mean_of_a_layer() -> None:
    assert picked(MAPS, 0, 0).tolist() == [[1, 0], [0.25, 0.75]]
    assert picked(MAPS, -1, None).tolist() == [[2, 0], [-1, 1]]


@pytest.mark.parametrize(
    ("layer", "head", "said"),
    [(2, None, "layer=2, but the model has 2 layers: 0 to 1"), (-3, 0, "layer=-3"), (0, 1, "head=1, but layer 0 has 1 heads: 0 to 0")],
)
def test_a_map_that_is_not_there_is_refused(layer: int, head: int | None, said: str) -> None:
    with pytest.raises(ExportError, match=said):
        picked(MAPS, layer, head)


def test_all_layers_and_heads_are_drawn_as_png_and_svg(tmp_path: Path) -> None:
    """Heads differ in number from layer to layer, and numbers may be negative."""
    draw(MAPS, [tmp_path / "a" / "maps.png", tmp_path / "maps.svg"])
    with Image.open(tmp_path / "a" / "maps.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 200
    svg = (tmp_path / "maps.svg").read_text()
    assert svg.count("<image") == 4  # 1 head and 3


def rendered(**how: object) -> str:
    console = Console(record=True, width=80, color_system="truecolor", force_terminal=True, file=StringIO())
    console.print(on_terminal(MAPS.A[0][0], ("x", "two words"), "layer [0]", **how))
    return console.export_text(styles=bool(how.get("colour", True)))


def test_the_terminal_shows_a_row_a_query_with_its_strongest_key() -> None:
    lines = rendered(colour=False).splitlines()
    assert lines[0].split() == ["x", "██", "1.00", "x"]
    assert lines[1].split() == ["two␣words", "░░▓▓", "0.75", "two␣words"]
    assert lines[2].strip() == "layer [0]"


def test_too_many_tokens_for_the_terminal() -> None:
    with pytest.raises(ExportError, match="33 tokens are too many for the terminal, which shows 32; look at the files"):
        on_terminal(np.eye(33, dtype=np.float32), ["t"] * 33, "")


def test_labels_show_white_space_and_are_short() -> None:
    assert [visible(token) for token in (" a", "\n", "incomprehensible")] == ["␣a", "\\n", "incomprehen…"]


def test_the_command(encoder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["attention", "--checkpoint", str(encoder), "--text", "the cat", "--out", str(tmp_path), "--head", "1"])
    assert done.exit_code == 0, done.output
    assert "layer 2, softmax, head 1" in done.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"attention.png", "attention.svg"}
