"""Families of encoders whose graph differs from BERT's: exported, with their attention maps, and held against torch by the export."""

from pathlib import Path

import pytest
import torch

from export import contract
from export.bundle import export_bundle
from export.maps.from_bundle import maps_of_bundle
from models.checkpoints.published import load_checkpoint
from models.maps.model import attention_maps
from tests.checkpoints import VOCABULARY, tiny_tokenizer
from tests.models.checkpoints import tiny

SAME = 1e-4  # float32 on both sides, sums in another order


def checkpoint(folder: Path, model_class: str, settings: dict) -> Path:
    tiny.build(model_class, {**settings, "vocab_size": len(VOCABULARY)}).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.export
def test_shared_layers_are_written_once_and_have_a_map_each(tmp_path: Path) -> None:
    """ALBERT: the weights of three layers take the bytes of one, in the graph for GPUs too."""
    folder = checkpoint(tmp_path / "albert", "AlbertModel", {**tiny.ALBERT, "hidden_size": 96, "intermediate_size": 192})
    manifest = export_bundle(folder, tmp_path / "bundle", maps=True, gpu=True)
    assert manifest.parity.max_abs_error <= SAME
    loaded = load_checkpoint(folder)
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    sizes = {file.name: file.size_bytes for file in contract.verify(tmp_path / "bundle").files}
    assert weights * 0.9 <= sizes["model.onnx.data"] <= weights * 1.1
    assert weights * 0.45 <= sizes["gpu.onnx.data"] <= weights * 0.55  # float16
    maps = maps_of_bundle(tmp_path / "bundle", "the cat")
    ids = tiny_tokenizer().encode("the cat").ids
    wanted = attention_maps(loaded.model.encoder, torch.tensor([ids]))
    assert len(maps.A) == len(wanted) == tiny.ALBERT["num_hidden_layers"]
    assert all(abs(got - each.A.numpy()).max() <= SAME for got, each in zip(maps.A, wanted, strict=True))
