"""Small random encoder-decoders, as a training run writes them, and bundles of them."""

from pathlib import Path
from typing import Any

import torch

from export import contract
from models.encoder_decoder.checkpoint import save_encoder_decoder
from models.encoder_decoder.config import RecurrentConfig, TransformerConfig
from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.recurrent import RecurrentEncoderDecoder
from models.encoder_decoder.transformer import TransformerEncoderDecoder
from models.folders.byte_tokenizer import byte_tokenizer
from tests.exports import exported

KINDS = ("additive", "dot", "transformer", "paper")
PAPERS = {"positions": "sinusoidal", "norm": "post", "activation": "relu"}  # Vaswani et al. 2017
EXAMPLES = ("one", "forty-two", "a thousand and one")
END = 10
_TEXTS = {"vocab_size": 256, "begin_token_id": 0, "end_token_id": END, "max_source": 40, "max_output": 7}


def random_encoder_decoder(kind: str = "additive", **changes: int) -> EncoderDecoder:
    """Over bytes, with weights so large that every part of it shows in the logits."""
    torch.manual_seed(0)
    if kind in ("transformer", "paper"):
        shape: dict[str, Any] = {"d_model": 16, "n_heads": 2, "d_feedforward": 24, "n_encoder_layers": 1, "n_decoder_layers": 2}
        shape |= PAPERS if kind == "paper" else {}
        model: EncoderDecoder = TransformerEncoderDecoder(TransformerConfig(**(_TEXTS | shape | changes)))
    else:
        shape = {"d_embedding": 12, "d_encoder": 8, "d_state": 16, "d_hidden": 8}
        model = RecurrentEncoderDecoder(RecurrentConfig(score=kind, **(_TEXTS | shape | changes)))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def tiny_encoder_decoder(folder: Path, kind: str = "additive", **changes: int) -> Path:
    """A checkpoint folder."""
    save_encoder_decoder(folder, random_encoder_decoder(kind, **changes), tokenizer=byte_tokenizer().to_str(), examples=EXAMPLES)
    return folder


def endless_encoder_decoder_bundle(path: Path) -> Path:
    """One that goes round in circles, as long as it may: its end is a byte that is none of them."""
    tiny_encoder_decoder_bundle(path, name="endless-writer", end_token_id=255)
    manifest = contract.read_manifest(path)
    assert manifest.encoder_decoder is not None
    both = manifest.encoder_decoder.model_copy(update={"max_output": 1_000_000})  # after the export, which tries all of it
    (path / contract.MANIFEST).write_text(contract.dump(manifest.model_copy(update={"encoder_decoder": both})), encoding="utf-8")
    return path


def tiny_encoder_decoder_bundle(path: Path, kind: str = "additive", *, name: str = "tiny-writer", **changes: int) -> Path:
    exported(tiny_encoder_decoder(path.with_name(f"{path.name}-checkpoint"), kind, **changes), path, name=name)
    return path
