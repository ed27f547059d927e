"""Decoders with random weights, exported to be measured: what a step costs depends on shapes and not on values."""

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
    """The same decoder but for its layers."""

    ours: Path  # a bundle
    twin: Path  # a graph


def build_pair(shape: ModelShape, folder: Path) -> Pair:
    """Causal linear attention and its softmax twin."""
    config = DecoderConfig(
        vocab_size=256,
        d_model=shape.d_model,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        d_feedforward=shape.d_feedforward,
        layers="causal_linear",
        positions="sinusoidal",  # the paper's are learned: one addition as well
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
    """The graph of the same decoder with softmax layers and a cache. `tokenizer` is the text of its file."""
    softmax = replace(config, layers="causal_softmax", layer_options={})
    return export_cached(_save(softmax, tokenizer, folder / "checkpoint"), folder / "graph")


def config_of(checkpoint: Path, manifest: contract.Manifest) -> DecoderConfig:
    """Of the decoder that became the bundle. LoadtestError when the checkpoint is another one."""
    source = load_decoder(checkpoint)
    if source.weights_sha256 != manifest.source.weights_sha256:
        raise LoadtestError(f"{checkpoint} is not what {manifest.name} was made of: its weights differ. Give its own --checkpoint")
    return source.config


def _save(config: DecoderConfig, tokenizer: str, folder: Path) -> Path:
    torch.manual_seed(0)
    save_decoder(folder, Decoder(config).eval(), tokenizer=tokenizer)
    return folder
