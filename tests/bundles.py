"""Real bundles of small random models, for tests of what serves them. A few seconds each: make one a session, not one a test."""

from pathlib import Path

from export.bundle import export_bundle
from tests.checkpoints import tiny_classifier, tiny_encoder


def tiny_encoder_bundle(path: Path, *, pooling: str = "mean", name: str = "tiny-encoder", maps: bool = False) -> Path:
    """D = 48, 64 tokens, prompts "query" and "document"."""
    return _export(tiny_encoder(_checkpoint(path), pooling=pooling), path, name, maps=maps)


def tiny_reranker_bundle(path: Path, *, name: str = "tiny-reranker") -> Path:
    return _export(tiny_classifier(_checkpoint(path), n_labels=1), path, name)


def tiny_classifier_bundle(path: Path, *, name: str = "tiny-classifier", per_token: bool = False, maps: bool = False) -> Path:
    """Three labels: negative, neutral, positive."""
    return _export(tiny_classifier(_checkpoint(path), n_labels=3, per_token=per_token), path, name, maps=maps)


def _checkpoint(path: Path) -> Path:
    return path.with_name(f"{path.name}-checkpoint")


def _export(checkpoint: Path, path: Path, name: str, *, maps: bool = False) -> Path:
    export_bundle(checkpoint, path, name=name, maps=maps)
    return path
