"""Exports decoders with random weights for measurements. The time of a step depends on shapes, not on values."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from export import contract
from export.bundle import export_bundle
from export.kv_cache.graph import export_cached
from loadtest.errors import LoadtestError
from loadtest.in_process.shapes import ModelShape
from models.checkpoints.decoder import load_decoder, save_decoder
from models.decoder.model import Decoder, DecoderConfig
from models.folders.byte_tokenizer import byte_tokenizer


@dataclass(frozen=True)
class Pair:
    """Two decoders that differ only in their attention layers."""

    ours: Path  # bundle with causal linear attention
    twin: Path  # graph with softmax attention


def build_pair(shape: ModelShape, folder: Path) -> Pair:
    """Export a decoder with causal linear attention, and its twin with softmax attention."""
    config = DecoderConfig(
        vocab_size=256,
        d_model=shape.d_model,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        d_feedforward=shape.d_feedforward,
        layers="causal_linear",
        positions="sinusoidal",  # the paper's position embeddings are learned; both kinds cost one addition
        norm="layer",
        bias=True,
        gated=False,
        activation="gelu",
    )
    tokenizer = byte_tokenizer().to_str()
    checkpoint = _save(config, tokenizer, folder / "checkpoint")
    export_bundle(checkpoint, folder / "bundle", name=f"{shape.name}-shape")
    return Pair(folder / "bundle", build_twin(config, tokenizer, folder / "twin"))


def build_twin(config: DecoderConfig, tokenizer: str, folder: Path) -> Path:
    """Export a decoder like `config` with softmax attention and a KV cache instead of its own attention, and return its graph. `tokenizer`
    is the content of a tokenizer.json."""
    softmax = replace(config, layers="causal_softmax", layer_options={})
    return export_cached(_save(softmax, tokenizer, folder / "checkpoint"), folder / "graph")


def config_of(checkpoint: Path, manifest: contract.Manifest) -> DecoderConfig:
    """Return the configuration of the bundle's decoder. Raises LoadtestError if the checkpoint is of another decoder."""
    source = load_decoder(checkpoint)
    if source.weights_sha256 != manifest.source.weights_sha256:
        raise LoadtestError(f"{checkpoint} is not the checkpoint of {manifest.name}: its weights differ. Give the right --checkpoint")
    return source.config


def _save(config: DecoderConfig, tokenizer: str, folder: Path) -> Path:
    torch.manual_seed(0)
    save_decoder(folder, Decoder(config).eval(), tokenizer=tokenizer)
    return folder
