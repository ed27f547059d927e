"""Real bundles of small random models, for tests of what serves them. A few seconds each: make one a session, not one a test."""

from pathlib import Path

import numpy as np
import onnx
import torch

from export import contract
from models.checkpoints.own_encoder import save_encoder
from models.checkpoints.published import load_checkpoint
from models.training.distillation.delta import softmax_tokens
from models.training.distillation.student import with_attention
from tests.checkpoints import VOCABULARY, tiny_classifier, tiny_encoder
from tests.exports import exported

WITHHELD = "~"  # a text of a bundle that `withholding` has changed, which is answered with 500


def tiny_encoder_bundle(path: Path, *, pooling: str = "mean", name: str = "tiny-encoder", maps: bool = False) -> Path:
    """D = 48, 64 tokens, prompts "query" and "document"."""
    return _export(tiny_encoder(_checkpoint(path), pooling=pooling), path, name, maps=maps)


def tiny_hybrid_checkpoint(folder: Path) -> Path:
    """An untrained student of `tiny_encoder`: hybrid attention in blocks of 8 and 200 positions. Up to 64 tokens it is its teacher."""
    teacher = load_checkpoint(tiny_encoder(folder.with_name(f"{folder.name}-teacher")))
    torch.manual_seed(0)
    student = with_attention(teacher, "hybrid", {"block": 8}, 200)
    tokenizer = teacher.tokenizer_file.read_text(encoding="utf-8")
    save_encoder(folder, student, tokenizer=tokenizer, softmax_tokens=softmax_tokens(student, teacher))
    return folder


def tiny_hybrid_bundle(path: Path, *, name: str = "tiny-hybrid") -> Path:
    """With a graph of its own for texts of up to 64 tokens, and attention maps."""
    return _export(tiny_hybrid_checkpoint(_checkpoint(path)), path, name, maps=True)


def tiny_reranker_bundle(path: Path, *, name: str = "tiny-reranker") -> Path:
    return _export(tiny_classifier(_checkpoint(path), n_labels=1), path, name)


def tiny_classifier_bundle(path: Path, *, name: str = "tiny-classifier", per_token: bool = False, maps: bool = False) -> Path:
    """Three labels: negative, neutral, positive."""
    return _export(tiny_classifier(_checkpoint(path), n_labels=3, per_token=per_token), path, name, maps=maps)


def withholding(bundle: Path) -> Path:
    """A bundle of this module, changed so that the vector of WITHHELD is not finite. No golden vector has this token."""
    graph = onnx.load(str(bundle / "model.onnx"), load_external_data=False)
    (tokens,) = [each for each in graph.graph.initializer if each.dims[:1] == [len(VOCABULARY)]]
    stored = {each.key: each.value for each in tokens.external_data}
    row = np.full(tokens.dims[1], np.nan, np.float32).tobytes()
    data = bundle / stored["location"]
    with data.open("r+b") as file:
        file.seek(int(stored["offset"]) + VOCABULARY.index(WITHHELD) * len(row))
        file.write(row)
    manifest = contract.read_manifest(bundle)
    hashes = {data.name: contract.sha256(data)}
    files = tuple(each.model_copy(update={"sha256": hashes.get(each.name, each.sha256)}) for each in manifest.files)
    (bundle / contract.MANIFEST).write_text(contract.dump(manifest.model_copy(update={"files": files})))
    return bundle


def _checkpoint(path: Path) -> Path:
    return path.with_name(f"{path.name}-checkpoint")


def _export(checkpoint: Path, path: Path, name: str, *, maps: bool = False) -> Path:
    exported(checkpoint, path, name=name, maps=maps)
    return path
