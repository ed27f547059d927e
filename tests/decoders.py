"""Small random decoders, as a training run writes them: weights, tokenizer and settings; and bundles of them."""

from pathlib import Path

import torch

from models.checkpoints.decoder import ImageFormat, save_decoder
from models.decoder.model import Decoder, DecoderConfig
from models.folders.byte_tokenizer import byte_tokenizer
from models.layers import LAYERS
from tests.exports import exported

TINY = {"vocab_size": 256, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_feedforward": 24, "layers": "causal_linear"}

SETTLES = {name for layer in LAYERS.values() for name in layer.settles}  # state tensors that later tokens need not change

# A block of each layer whose state has a constant size.
_LAYERS = (
    "causal_vq",  # first: rounding in front of it could give a key another code
    "causal_flash",
    "causal_linear",
    "causal_efficient",
    "causal_performer",
    "hedgehog",
    "based",
    "retention",
    "gated_linear",
    "delta",
    "gated_delta",
    "sliding_window",
    "causal_longformer",
)
EVERY_CONSTANT_STATE = {
    "layers": _LAYERS,
    "n_layers": len(_LAYERS),
    "window": 9,
    "layer_options": {
        "causal_vq": {"n_codes": 16},
        "causal_flash": {"group": 9},
        "causal_longformer": {"window": 9, "n_global": 2},
    },
}


def random_decoder(*, seed: int = 0, **config: object) -> Decoder:
    """Weights so large that every part of it shows in the logits."""
    torch.manual_seed(seed)
    decoder = Decoder(DecoderConfig(**(TINY | config))).eval()
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return decoder


def tiny_decoder(folder: Path, *, chat_template: str | None = None, image: ImageFormat | None = None, **config: object) -> Path:
    """A checkpoint folder."""
    decoder = random_decoder(**config)
    tokenizer = byte_tokenizer().to_str()
    save_decoder(folder, decoder, tokenizer=tokenizer, eos_token_ids=(10,), chat_template=chat_template, image=image)
    return folder


def tiny_image(width: int = 4, height: int = 3) -> ImageFormat:
    """Of ten digits in four grey levels, which are written a, b, c, d."""
    letters = byte_tokenizer().encode("abcd").ids
    return ImageFormat(width=width, height=height, level_token_ids=tuple(letters), prompts=tuple("0123456789"))


def tiny_decoder_bundle(path: Path, *, name: str = "tiny-decoder", **config: object) -> Path:
    exported(tiny_decoder(path.with_name(f"{path.name}-checkpoint"), **config), path, name=name)
    return path
