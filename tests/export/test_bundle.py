"""A checkpoint goes in, and a bundle that gives torch's numbers comes out: complete, or not at all."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from export import contract
from export.bundle import export_bundle
from export.checks.parity import Feed, open_graph
from export.errors import ExportError
from export.graphs.onnx_file import save, weight_file
from tests import checkpoints
from tests.checkpoints import VOCABULARY, tiny_tokenizer
from tests.models.checkpoints import tiny

TOLERANCE = 2e-4  # the same sums in another order; token vectors reach about 20


def run(bundle: Path, feed: Feed) -> dict[str, NDArray[np.float32]]:
    manifest = contract.verify(bundle)
    names = [tensor.name for tensor in manifest.graph.outputs]
    fed = {tensor.name: feed[tensor.name] for tensor in manifest.graph.inputs}
    return dict(zip(names, open_graph(bundle / manifest.graph.file, threads=1).run(names, fed), strict=True))


def batch(lengths: tuple[int, ...]) -> Feed:
    mask = (np.arange(max(lengths))[None, :] < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(0).integers(5, len(checkpoints.VOCABULARY), mask.shape) * mask
    return {contract.INPUT_IDS: ids, contract.ATTENTION_MASK: mask}


# The numbers. The export holds every graph against torch, and tests/models/checkpoints/ hold torch against transformers.


def test_an_encoder_gives_the_mean_of_the_token_vectors(encoder_bundle: Path) -> None:
    feed = batch((9, 1, 64, 30))
    got = run(encoder_bundle, feed)
    mask = feed[contract.ATTENTION_MASK][:, :, None]
    pooled = (got[contract.TOKEN_EMBEDDINGS] * mask).sum(axis=1) / mask.sum(axis=1)
    assert np.abs(got[contract.POOLED] - pooled).max() < TOLERANCE
    assert np.abs(got[contract.EMBEDDING] - pooled / np.linalg.norm(pooled, axis=1, keepdims=True)).max() < TOLERANCE


@pytest.mark.parametrize(
    ("n_labels", "per_token", "kind"),
    [(1, False, "reranker"), (3, False, "classifier"), (3, True, "token_classifier")],
    ids=["reranker", "classifier", "token classifier"],
)
def test_classifiers_have_their_labels(tmp_path: Path, n_labels: int, per_token: bool, kind: str) -> None:
    checkpoint = checkpoints.tiny_classifier(tmp_path / "checkpoint", n_labels=n_labels, per_token=per_token)
    manifest = export_bundle(checkpoint, tmp_path / "bundle")
    assert (manifest.kind, manifest.width) == (kind, n_labels)
    assert list(manifest.id2label.values()) == ["negative", "neutral", "positive"][:n_labels]
    golden = contract.read_golden(tmp_path / "bundle", contract.Golden)
    assert (golden.pairs is not None) == (kind == "reranker")


FAMILIES = {
    "RobertaModel": {**tiny.BERT, "pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66},
    "MPNetModel": {**tiny.BERT, "pad_token_id": 1, "max_position_embeddings": 66},
    "ModernBertModel": {**tiny.MODERNBERT, "local_attention": 8, "max_position_embeddings": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_have_the_attention_operator(tmp_path: Path, family: str) -> None:
    """Positions after padding, a bias by distance, rotations with local windows: each its own way through it."""
    settings = {**FAMILIES[family], "vocab_size": len(checkpoints.VOCABULARY)}
    tiny.build(family, settings).save_pretrained(tmp_path / "checkpoint")
    checkpoints.tiny_tokenizer().save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    manifest = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    assert {"Attention", "MultiHeadAttention"} & set(manifest.graph.operators)


def test_all_minilm_is_exported_within_tolerance(minilm_bundle: Path) -> None:
    manifest = contract.verify(minilm_bundle)
    assert manifest.parity.max_abs_error < manifest.parity.tolerance
    assert manifest.parity.min_cosine > 0.999999
    assert (1, 1) in manifest.parity.shapes
    assert (2, manifest.limits.max_tokens) in manifest.parity.shapes
    assert manifest.graph.operators["Attention"] == 6
    assert "SkipLayerNormalization" not in manifest.graph.operators, "it costs 15 % on a CPU: docs/decisions.md"


def test_golden_texts_reach_the_limit_of_length(minilm_bundle: Path) -> None:
    from tokenizers import Tokenizer

    golden, limit = contract.read_golden(minilm_bundle, contract.Golden), contract.verify(minilm_bundle).limits.max_tokens
    tokenizer = Tokenizer.from_file(str(minilm_bundle / contract.TOKENIZER))
    tokenizer.no_truncation()
    assert "" in golden.texts
    assert max(len(tokenizer.encode(text)) for text in golden.texts) > limit
    assert np.allclose(np.linalg.norm(golden.outputs, axis=1), 1, atol=1e-6)


# The choices


def test_linear_attention_is_exported_and_said_to_be_untrained(encoder_checkpoint: Path, tmp_path: Path) -> None:
    manifest = export_bundle(encoder_checkpoint, tmp_path / "linear", attention="linear")
    assert manifest.source.attention == "linear"
    assert manifest.source.untrained
    assert "Attention" not in manifest.graph.operators


def test_fp16_answers_in_float32_and_is_close(gpu_bundle: Path, encoder_bundle: Path) -> None:
    manifest = contract.verify(gpu_bundle)
    assert manifest.precision == "fp16"
    assert manifest.parity.min_cosine > 0.9999
    assert "not faster" in manifest.graph.optimisation
    assert {tensor.dtype for tensor in manifest.graph.outputs} == {"float32"}
    bundles = (contract.verify(bundle).files for bundle in (gpu_bundle, encoder_bundle))
    half, full = (sum(file.size_bytes for file in files if file.name.startswith(contract.GRAPH)) for files in bundles)
    assert half < 0.7 * full
    weights = onnx.load(gpu_bundle / contract.GRAPH).graph.initializer
    assert any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in weights)


def test_who_may_read_a_graph_may_read_its_weights(encoder_bundle: Path, tmp_path: Path) -> None:
    save(onnx.load(encoder_bundle / contract.GRAPH), file := tmp_path / contract.GRAPH, weights_beside=True)
    assert weight_file(file).stat().st_mode == file.stat().st_mode


def test_a_checkpoint_without_pooling_is_refused(encoder_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(encoder_checkpoint, tmp_path / "checkpoint")
    modules = json.loads((checkpoint / "modules.json").read_text())
    (checkpoint / "modules.json").write_text(json.dumps(modules[:1]))
    with pytest.raises(ExportError, match="has no pooling"):
        export_bundle(checkpoint, tmp_path / "bundle")


def test_the_tokenizer_of_a_bundle_is_made_from_vocab_txt(encoder_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(encoder_checkpoint, tmp_path / "checkpoint")
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"strip_accents": False}))
    before = {file.name for file in checkpoint.iterdir()}
    export_bundle(checkpoint, tmp_path / "bundle")
    made = Tokenizer.from_file(str(tmp_path / "bundle" / contract.TOKENIZER))
    for text in ("The cat is in Paris!", "größe 日本 unknown-word", ""):
        assert made.encode(text).ids == tiny_tokenizer().encode(text).ids
    assert {file.name for file in checkpoint.iterdir()} == before


@pytest.mark.parametrize("name", ["", "ein Name", "../up", "ü"])
def test_a_name_that_no_client_could_send_is_refused(encoder_checkpoint: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError, match="is not a model name"):
        export_bundle(encoder_checkpoint, tmp_path / "ü", name=name)


# Complete or absent


@pytest.fixture
def old(encoder_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that is already there."""
    return shutil.copytree(encoder_bundle, tmp_path / "bundle")


def test_an_older_bundle_is_replaced_when_the_new_one_is_complete(encoder_checkpoint: Path, old: Path) -> None:
    (old / "leftover.txt").write_text("of the old bundle")
    seen: dict[str, bool] = {}
    note = lambda step, fraction: seen.update({step: contract.read_manifest(old).name == "tiny-encoder"})  # noqa: E731
    manifest = export_bundle(encoder_checkpoint, old, name="new", progress=note)
    assert list(seen) == ["load", "trace", "optimise", "check", "write"]
    assert all(seen.values()), "the old bundle is there until the end"
    assert contract.verify(old) == manifest
    assert sorted(path.name for path in old.iterdir()) == sorted([contract.MANIFEST, *(file.name for file in manifest.files)])
    assert list(old.parent.iterdir()) == [old]


def intact(bundle: Path, name: str) -> bool:
    return contract.verify(bundle).name == name


@pytest.mark.parametrize(("at", "failure"), [("trace", KeyboardInterrupt), ("trace", OSError), ("write", OSError)])
def test_a_broken_export_leaves_the_old_bundle_and_nothing_else(
    encoder_checkpoint: Path, old: Path, failure: type[BaseException], at: str
) -> None:
    def stop(step: str, fraction: float | None) -> None:
        if step == at:
            raise failure

    with pytest.raises(failure):
        export_bundle(encoder_checkpoint, old, name="new", progress=stop)
    assert intact(old, "tiny-encoder")
    assert list(old.parent.iterdir()) == [old]


def test_a_directory_of_something_else_is_never_replaced(encoder_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="exists and is not a bundle"):
        export_bundle(encoder_checkpoint, tmp_path / "home")
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"
