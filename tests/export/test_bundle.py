"""A checkpoint goes in, and a bundle that gives torch's numbers comes out: complete, or not at all."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import transformers
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

# transformers computes the same sums in another order; logits and token vectors here reach about 20.
TOLERANCE = 2e-4


def run(bundle: Path, feed: Feed) -> dict[str, NDArray[np.float32]]:
    manifest = contract.verify(bundle)
    names = [tensor.name for tensor in manifest.graph.outputs]
    fed = {tensor.name: feed[tensor.name] for tensor in manifest.graph.inputs}
    return dict(zip(names, open_graph(bundle / manifest.graph.file, threads=1).run(names, fed), strict=True))


def batch(lengths: tuple[int, ...], *, seed: int = 0, pad_token_id: int = 0) -> Feed:
    random = np.random.default_rng(seed)
    mask = (np.arange(max(lengths))[None, :] < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.where(mask != 0, random.integers(5, len(checkpoints.VOCABULARY), mask.shape), pad_token_id)
    types = (np.arange(mask.shape[1])[None, :] > np.array(lengths)[:, None] // 2) * mask
    return {contract.INPUT_IDS: ids, contract.ATTENTION_MASK: mask, contract.TOKEN_TYPE_IDS: types.astype(np.int64)}


def transformers_run(model_class: str, checkpoint: Path, feed: Feed, *, types: bool = True) -> NDArray[np.float32]:
    import torch

    model = getattr(transformers, model_class).from_pretrained(checkpoint, attn_implementation="eager").eval()
    fed = {name: torch.from_numpy(value) for name, value in feed.items() if types or name != contract.TOKEN_TYPE_IDS}
    with torch.inference_mode():
        output: NDArray[np.float32] = model(**fed)[0].numpy()
    return output


# The numbers


def test_an_encoder_gives_the_mean_of_the_token_vectors(encoder_checkpoint: Path, encoder_bundle: Path) -> None:
    feed = batch((9, 1, 64, 30))
    got = run(encoder_bundle, feed)
    mask = feed[contract.ATTENTION_MASK][:, :, None]
    tokens = transformers_run("BertModel", encoder_checkpoint, feed, types=False) * mask
    pooled = tokens.sum(axis=1) / mask.sum(axis=1)
    assert np.abs(got[contract.TOKEN_EMBEDDINGS] - tokens).max() < TOLERANCE
    assert np.abs(got[contract.POOLED] - pooled).max() < TOLERANCE
    assert np.abs(got[contract.EMBEDDING] - pooled / np.linalg.norm(pooled, axis=1, keepdims=True)).max() < TOLERANCE


@pytest.mark.parametrize(
    ("n_labels", "per_token", "kind", "model_class"),
    [
        (1, False, "reranker", "BertForSequenceClassification"),
        (3, False, "classifier", "BertForSequenceClassification"),
        (3, True, "token_classifier", "BertForTokenClassification"),
    ],
    ids=["reranker", "classifier", "token classifier"],
)
def test_classifiers_give_the_logits_of_transformers(tmp_path: Path, n_labels: int, per_token: bool, kind: str, model_class: str) -> None:
    checkpoint = checkpoints.tiny_classifier(tmp_path / "checkpoint", n_labels=n_labels, per_token=per_token)
    manifest = export_bundle(checkpoint, tmp_path / "bundle")
    assert manifest.kind == kind
    assert manifest.width == n_labels
    assert list(manifest.id2label.values()) == ["negative", "neutral", "positive"][:n_labels]
    feed = batch((12, 64, 3))
    got = run(tmp_path / "bundle", feed)[contract.LOGITS]
    want = transformers_run(model_class, checkpoint, feed, types=not per_token)
    where = feed[contract.ATTENTION_MASK] != 0 if per_token else np.ones(3, bool)
    assert np.abs(got[where] - want[where]).max() < TOLERANCE
    golden = contract.read_golden(tmp_path / "bundle", contract.Golden)
    assert (golden.pairs is not None) == (kind == "reranker")


FAMILIES = {
    "RobertaModel": {**tiny.BERT, "pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66},
    "MPNetModel": {**tiny.BERT, "pad_token_id": 1, "max_position_embeddings": 66},
    "ModernBertModel": {**tiny.MODERNBERT, "local_attention": 8, "max_position_embeddings": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_give_the_vectors_of_transformers(tmp_path: Path, family: str) -> None:
    """Positions after padding, a bias by distance, rotations with local windows: each its own way through the attention operator."""
    settings = {**FAMILIES[family], "vocab_size": len(checkpoints.VOCABULARY)}
    tiny.build(family, settings).save_pretrained(tmp_path / "checkpoint")
    checkpoints.tiny_tokenizer().save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    manifest = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    feed = batch((40, 7, 2), pad_token_id=manifest.pad_token_id)
    got = run(tmp_path / "bundle", feed)[contract.TOKEN_EMBEDDINGS]
    want = transformers_run(family, tmp_path / "checkpoint", feed, types=False) * feed[contract.ATTENTION_MASK][:, :, None]
    assert np.abs(got - want).max() < TOLERANCE
    assert {"Attention", "MultiHeadAttention"} & set(manifest.graph.operators)


def test_a_text_without_tokens_gets_zeros_even_alone(encoder_bundle: Path) -> None:
    for lengths in ((0, 5), (0,)):
        feed = {name: np.zeros((len(lengths), 5), np.int64) for name in (contract.INPUT_IDS, contract.ATTENTION_MASK)}
        feed[contract.ATTENTION_MASK][1:] = 1
        outputs = run(encoder_bundle, feed)
        assert not any(value[0].any() for value in outputs.values())
        assert all(np.isfinite(value).all() for value in outputs.values())


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
