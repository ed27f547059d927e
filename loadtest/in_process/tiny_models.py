"""Exports an encoder and a decoder whose computation takes almost no time, to measure the cost of the service around a model."""

import json
from pathlib import Path

import torch

from export.bundle import export_bundle, export_file
from models.checkpoints.decoder import save_decoder
from models.decoder.model import Decoder, DecoderConfig
from models.folders.byte_tokenizer import byte_tokenizer

# One head of width 1 and no feed-forward layer, but vectors of 384 numbers, as many as those of all-MiniLM-L6-v2.
_ENCODER = {"d_model": 384, "n_layers": 1, "n_heads": 1, "d_head": 1, "d_feedforward": 0, "n_positions": 256}
_DECODER = DecoderConfig(vocab_size=256, d_model=16, n_layers=1, n_heads=2, d_feedforward=24, layers="causal_linear")


def export_tiny(tokenizer: Path, encoder: Path, decoder: Path) -> None:
    """Export both models, unless their bundles exist. The encoder gets the tokenizer of the bundle `tokenizer`, so that a text has as many
    tokens as in that bundle.
    """
    encoder.parent.mkdir(parents=True, exist_ok=True)
    if not encoder.exists():
        config = encoder.with_suffix(".json")
        config.write_text(json.dumps({"model": _ENCODER, "tokenizer": str(tokenizer.resolve())}))
        export_file(config, encoder, name=encoder.name)
    if not decoder.exists():
        torch.manual_seed(0)
        checkpoint = decoder.with_name(f"{decoder.name}-checkpoint")
        save_decoder(checkpoint, Decoder(_DECODER).eval(), tokenizer=byte_tokenizer().to_str())
        export_bundle(checkpoint, decoder, name=decoder.name)
