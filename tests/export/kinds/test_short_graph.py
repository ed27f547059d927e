"""The graph for short texts of an encoder of linear cost: what the export writes, and what it refuses."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from export import contract
from export.bundle import export_bundle
from export.checks.golden import cosines
from export.checks.golden_texts import TEXTS
from export.checks.parity import open_graph
from export.errors import ExportError
from export.graphs.hybrid import is_compact
from export.int8 import choice
from export.kinds import encoder
from export.kinds.load import Options, load
from export.maps.of_text import maps_of_bundle
from models.attention.linear.hybrid import HybridAttention
from models.checkpoints.published import load_checkpoint
from models.encoder.model import Encoder
from models.maps.model import attention_maps
from service.runtime.onnx import OnnxSession
from tests.bundles import tiny_hybrid_checkpoint
from tests.checkpoints import tiny_tokenizer

SHORT = 64  # tokens
SAME = 1e-5  # float32 on both sides, sums in another order


def feed(*rows: list[int]) -> dict[str, np.ndarray]:
    ids = np.array(rows, np.int64)
    return {contract.INPUT_IDS: ids, contract.ATTENTION_MASK: (ids != 0).astype(np.int64)}


def short_of(manifest: contract.Manifest) -> contract.ShortGraph:
    assert manifest.short_graph is not None
    return manifest.short_graph


def test_it_computes_the_teacher_and_is_described(hybrid_bundle: Path) -> None:
    manifest = contract.verify(hybrid_bundle)
    short = short_of(manifest)
    assert (short.max_tokens, short.attention, manifest.limits.max_tokens, manifest.source.attention) == (SHORT, "softmax", 200, "hybrid")
    assert short.parity.min_cosine >= 0.9999
    assert short.parity.shapes[-1] == (2, SHORT)
    assert manifest.parity.shapes[-1] == (2, 200)
    assert short.graph.operators["Attention"] == 3
    teacher = load_checkpoint(hybrid_bundle.with_name(f"{hybrid_bundle.name}-checkpoint-teacher")).model
    session = open_graph(hybrid_bundle / short.graph.file, threads=1)
    for N in (1, 30, SHORT):
        ids = torch.randint(5, 40, (1, N))
        with torch.no_grad():
            wanted = teacher(ids, torch.ones_like(ids)).embedding.numpy()
        assert abs(session.run([contract.EMBEDDING], feed(*ids.tolist()))[0] - wanted).max() <= SAME
    assert [manifest.graph_of(N).file for N in (1, SHORT, SHORT + 1, 200)] == ["short.onnx"] * 2 + ["model.onnx"] * 2


def test_its_large_weights_are_in_the_first_graphs_file_unless_they_are_of_its_own_operator(hybrid_bundle: Path) -> None:
    def beside(name: str) -> dict[tuple[int, ...], int]:
        """The number of tensors in the weight file, by shape."""
        tensors = onnx.load(hybrid_bundle / name, load_external_data=False).graph.initializer
        found = [tuple(each.dims) for each in tensors if each.data_location == onnx.TensorProto.EXTERNAL]
        assert {entry.value for each in tensors for entry in each.external_data if entry.key == "location"} == {"model.onnx.data"}
        return {dims: found.count(dims) for dims in found}

    shared, first = beside(contract.SHORT_GRAPH), beside(contract.GRAPH)
    assert shared[48, 96] == first[48, 96] == 3  # feed-forward layers
    assert shared.keys() <= first.keys()
    assert not (hybrid_bundle / "short.onnx.data").exists()


def test_maps_show_the_path_that_is_served(hybrid_bundle: Path) -> None:
    graph = contract.verify(hybrid_bundle).attention_graph
    assert graph is not None
    assert graph.max_tokens == SHORT
    assert {(layer.attention, layer.effective) for layer in graph.layers} == {("softmax", False)}
    teacher = load_checkpoint(hybrid_bundle.with_name(f"{hybrid_bundle.name}-checkpoint-teacher")).model.encoder
    text = "the cat in the river of paris and the dog in the house of stone"
    assert isinstance(teacher, Encoder)
    wanted = attention_maps(teacher, torch.tensor([tiny_tokenizer().encode(text).ids]))
    for got, each in zip(maps_of_bundle(hybrid_bundle, text).A, wanted, strict=True):
        assert abs(got - each.A.numpy()).max() <= 1e-4


def test_a_graph_that_differs_from_torch_is_not_written(hybrid_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of one operator are damaged on the way into the bundle."""
    checkpoint = hybrid_bundle.with_name(f"{hybrid_bundle.name}-checkpoint")

    def damaged(file: Path, served: Path) -> None:
        share(file, served)
        model = onnx.load(file, load_external_data=False)
        qkv = next(each for each in model.graph.initializer if tuple(each.dims) == (48, 144))
        values = onnx.numpy_helper.to_array(qkv).copy()
        values[0, 0] += 0.5
        qkv.CopyFrom(onnx.numpy_helper.from_array(values, qkv.name))
        onnx.save(model, file)

    share = encoder.share
    monkeypatch.setattr(encoder, "share", damaged)
    with pytest.raises(ExportError, match="away from the model"):
        export_bundle(checkpoint, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_golden_texts_on_both_sides_are_needed(hybrid_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = hybrid_bundle.with_name(f"{hybrid_bundle.name}-checkpoint")
    for texts, said in ((TEXTS[:1], "1 of 1 golden texts"), (TEXTS[-1:], "0 of 1 golden texts")):
        monkeypatch.setattr(encoder, "TEXTS", texts)
        with pytest.raises(ExportError, match=said):
            load(checkpoint, Options()).prepare()


def test_in_int8_both_graphs_have_the_recipe_that_was_best_for_long_texts(
    hybrid_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "SECONDS", 0.01)
    checkpoint, bundle = hybrid_bundle.with_name(f"{hybrid_bundle.name}-checkpoint"), tmp_path / "int8"
    manifest = export_bundle(checkpoint, bundle, precision="int8", min_cosine=0.97)
    short = short_of(contract.verify(bundle))
    products = {"MatMulIntegerToFloat", "MatMulNBits"} & manifest.graph.operators.keys()
    assert products
    assert products == {"MatMulIntegerToFloat", "MatMulNBits"} & short.graph.operators.keys()
    assert 0.97 <= short.parity.min_cosine < 0.99999
    assert short.graph.optimisation.endswith(next(trial.recipe for trial in manifest.trials if trial.kept))
    teacher = load_checkpoint(hybrid_bundle.with_name(f"{hybrid_bundle.name}-checkpoint-teacher")).model
    ids = torch.randint(5, 40, (1, SHORT))
    with torch.no_grad():
        wanted = teacher(ids, torch.ones_like(ids)).embedding.numpy()
    served = OnnxSession(bundle, manifest, threads=1).run([contract.EMBEDDING], ids.tolist(), None)[contract.EMBEDDING]
    assert cosines(served, wanted)[0] >= 0.97


def test_in_fp16_all_texts_have_one_graph(tmp_path: Path) -> None:
    checkpoint = tiny_hybrid_checkpoint(tmp_path / "student")
    exporter = load(checkpoint, Options("fp16"))
    assert isinstance(exporter, encoder.EncoderExporter)
    assert exporter.short is None
    assert exporter.short_graph(tmp_path, tmp_path) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": 200}, "short_graph.max_tokens=200 must be below limits.max_tokens=200"),
        ({"max_tokens": 63}, "attention_graph.max_tokens=64 exceeds short_graph.max_tokens=63"),
        ({"outputs": ()}, "short_graph.graph.outputs are none"),
        ({"file": "other.onnx"}, "files does not list other.onnx"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(hybrid_bundle: Path, tmp_path: Path, change: dict, said: str) -> None:
    bundle = Path(shutil.copytree(hybrid_bundle, tmp_path / "bundle"))
    manifest = contract.read_manifest(bundle)
    short = short_of(manifest)
    short = short.model_copy(update=change if "max_tokens" in change else {"graph": short.graph.model_copy(update=change)})
    (bundle / contract.MANIFEST).write_text(contract.dump(manifest.model_copy(update={"short_graph": short})))
    with pytest.raises(contract.BundleError, match=said):
        contract.read_manifest(bundle)


def test_other_forms_of_hybrid_attention_keep_their_own_graph() -> None:
    """Maps without a logarithm, no near tokens, and float16, whose range is too small."""
    assert is_compact(HybridAttention(16, 2, block=4))
    assert not is_compact(HybridAttention(16, 2, block=0))
    assert not is_compact(HybridAttention(16, 2, block=4, feature_map="elu"))
    assert not is_compact(HybridAttention(16, 2, block=4).half())
