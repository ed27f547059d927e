"""Every attention of an encoder is described by a file, and two are exported with their maps. The graphs of the other layers are in
test_layers.py.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from export import contract
from export.bundle import export_file
from export.errors import ExportError
from export.maps.of_text import maps_of_bundle
from models.checkpoints.description import build_encoder
from models.checkpoints.published import load_checkpoint
from models.layers import LAYERS
from service.cli import app

SEEING_BOTH_WAYS = [name for name, layer in LAYERS.items() if not layer.capabilities.causal]
EXPORTED = ("linear", "differential")
SHAPE = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_feedforward": 16, "n_positions": 65}
COMPARED = {(1, 1), (1, 2), (5, 17), (8, 64), (2, 65)}  # B, N of the export's own comparison; of the five texts, one has no token
TEXT = "to be, or not"  # 13 tokens, a byte each
SAME = 1e-4  # float32 on both sides, sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("every")


def described(folder: Path, attention: str, **keys: Any) -> Path:
    options = dict(LAYERS[attention].examples.small)
    if "n_positions" in inspect.signature(LAYERS[attention]).parameters:
        options = {**options, "n_positions": SHAPE["n_positions"]}
    file = folder / f"{attention}.yaml"
    file.write_text(json.dumps({"model": {**SHAPE, "attention": attention, "attention_options": options}, **keys}))
    return file


@pytest.fixture(scope="module")
def exported(folder: Path) -> Any:
    """The bundle of an attention, made once."""

    def get(attention: str) -> Path:
        bundle = folder / "bundles" / attention
        if not bundle.exists():
            export_file(described(folder, attention), bundle, maps=True)
        return bundle

    return get


def test_each_is_built_from_its_description(folder: Path) -> None:
    built = {name: folder / "built" / name for name in SEEING_BOTH_WAYS}
    for name, checkpoint in built.items():
        build_encoder(described(folder, name), checkpoint)
    loaded = {name: load_checkpoint(checkpoint) for name, checkpoint in built.items()}
    assert {name: type(each.model.encoder.blocks[0].attention) for name, each in loaded.items()} == {name: LAYERS[name] for name in built}
    assert all(each.untrained for each in loaded.values())


@pytest.mark.parametrize("name", EXPORTED)
def test_it_is_exported(name: str, exported: Any) -> None:
    """The export has held the vector of every token against torch, or would have failed."""
    manifest = contract.verify(exported(name))
    assert (manifest.source.attention, manifest.source.checkpoint, manifest.source.untrained) == (name, name, True)
    assert set(manifest.parity.shapes) >= COMPARED
    assert manifest.parity.max_abs_error <= SAME


def test_weights_of_the_served_graph_are_referred_to(encoder_with_maps: Path) -> None:
    """The embeddings, and the one matrix of queries, keys and values of each layer."""
    graph = (encoder_with_maps / contract.ATTENTION_GRAPH).read_bytes()
    assert graph.count(b"model.onnx.data") >= 2
    data = (encoder_with_maps / "model.onnx.data").read_bytes()
    assert not any(data[at : at + 1024] in graph for at in range(0, len(data), 4096))


def test_the_commands(folder: Path, exported: Any, tmp_path: Path) -> None:
    bundle = exported("linear")
    shown = CliRunner().invoke(app, ["attention", "--bundle", str(bundle), "--text", TEXT, "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert {file.name for file in tmp_path.iterdir()} == {"attention.png", "attention.svg"}
    assert CliRunner().invoke(app, ["attention", "--text", TEXT]).exit_code == 2
    assert "give the model" in CliRunner().invoke(app, ["export", "--out", str(tmp_path / "x")]).output
    both = ["--checkpoint", str(folder), "--config", str(folder / "linear.yaml")]
    assert "not both" in CliRunner().invoke(app, ["export", *both, "--out", str(tmp_path / "x")]).output


def test_maps_are_of_fp32_weights(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="attention maps need an fp32 graph, but precision=int8; leave out --maps"):
        export_file(described(folder, "softmax"), tmp_path / "x", maps=True, precision="int8")


def test_a_bundle_without_the_graph_says_how_to_add_it(encoder_bundle: Path) -> None:
    with pytest.raises(ExportError, match=r"was exported without its attention graph.* --name tiny-encoder --maps` adds it"):
        maps_of_bundle(encoder_bundle, TEXT)
