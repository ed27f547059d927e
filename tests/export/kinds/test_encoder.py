"""Families of encoders whose graph differs from BERT's: exported, with their attention maps, and held against torch by the export."""

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

from export import contract
from export.bundle import export_bundle
from export.errors import ExportError
from export.maps.of_text import maps_of_bundle
from models.checkpoints.published import load_checkpoint
from models.maps.model import attention_maps
from service.call import Call
from service.catalog import Catalog
from service.encoding.request import EncodeRequest
from service.errors import ServiceError
from service.settings import Settings
from tests.checkpoints import VOCABULARY, tiny_tokenizer
from tests.models.checkpoints import tiny

SAME = 1e-4  # float32 on both sides, sums in another order


def checkpoint(folder: Path, model_class: str, settings: dict) -> Path:
    tiny.build(model_class, {**settings, "vocab_size": len(VOCABULARY)}).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


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


async def test_a_reranker_with_disentangled_attention_is_served(tmp_path: Path) -> None:
    """DeBERTa: of pairs of several lengths in one request, and the scores are those of torch for each pair alone."""
    settings = {**tiny.DEBERTA, "num_labels": 1, "max_position_embeddings": 64}
    folder = checkpoint(tmp_path / "deberta", "DebertaV2ForSequenceClassification", settings)
    manifest = export_bundle(folder, tmp_path / "reranker", maps=True)  # which holds the maps against torch
    assert (manifest.kind, manifest.source.attention, manifest.limits.max_tokens) == ("reranker", "disentangled", 64)
    assert manifest.parity.max_abs_error <= SAME
    catalog = Catalog(Settings(bundles=(tmp_path / "reranker",), threads=1))
    await asyncio.to_thread(catalog.load)
    catalog.start()
    pairs = [("a cat", "the dog"), ("the river in paris", "a stone house"), ("cat", "cat")]
    answer = await catalog.models["reranker"].answer(EncodeRequest(inputs=list(pairs)), Call("id", time.monotonic()))
    await catalog.stop()
    model = load_checkpoint(folder).model
    for row, pair in zip(answer.rows, pairs, strict=True):
        ids = torch.tensor([tiny_tokenizer().encode(*pair).ids])
        with torch.no_grad():
            assert not isinstance(row, ServiceError)
            assert abs(float(row[0][0]) - float(model(ids, torch.ones_like(ids)))) <= SAME


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of static embeddings as sentence-transformers writes it."""
    folder = tmp_path_factory.mktemp("static")
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}])
    )
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    vectors = torch.randn(len(VOCABULARY), 8, generator=torch.Generator().manual_seed(0))
    save_file({"embedding.weight": vectors}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
async def test_static_embeddings_are_served(table: Path, tmp_path: Path, precision: contract.Precision) -> None:
    """The bundle's tokenizer adds no special tokens, which would count in the mean."""
    manifest = export_bundle(table, tmp_path / "static", precision=precision)
    assert (manifest.kind, manifest.source.architecture, manifest.source.attention) == ("encoder", "StaticEmbedding", "none")
    catalog = Catalog(Settings(bundles=(tmp_path / "static",), threads=1))
    await asyncio.to_thread(catalog.load)
    catalog.start()
    texts = ["the cat", "a dog in the house", "paris"]
    request = EncodeRequest(inputs=list(texts), outputs=(contract.POOLED,))
    answer = await catalog.models["static"].answer(request, Call("id", time.monotonic()))
    await catalog.stop()
    theirs = SentenceTransformer(str(table), device="cpu").encode(texts)
    assert answer.n_tokens == 2 + 5 + 1
    assert np.abs(np.array([row[0] for row in answer.rows if not isinstance(row, ServiceError)]) - theirs).max() <= (
        SAME if precision == "fp32" else 5e-3
    )


def test_static_embeddings_have_no_products_to_quantise(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="precision=int8 is for products of matrices, of which a static embedding has none; fp16 halves"):
        export_bundle(table, tmp_path / "static", precision="int8")
    with pytest.raises(ExportError, match="StaticEmbedding has no attention maps"):
        export_bundle(table, tmp_path / "static", maps=True)
