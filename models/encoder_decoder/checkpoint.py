"""Reads and writes encoder-decoder checkpoints. Training writes the folder below and the export reads it.

FOLDER/
  config.json           {"architectures": [name of its class], "attnserve_encoder_decoder": {the fields of its config},
                         "examples": [typical sources, with which a bundle is tested]}
  model.safetensors     the parameters by name
  tokenizer.json        in the format of the package `tokenizers`
  README.md             the model card, optional
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from models.checkpoints.own import CONFIG, TOKENIZER, fill_places, save_folder, tokenizer_file, weights_sha256
from models.encoder_decoder.config import Config, RecurrentConfig, TransformerConfig
from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.recurrent import RecurrentEncoderDecoder
from models.encoder_decoder.transformer import TransformerEncoderDecoder
from models.folders.config_fields import validated
from models.folders.folder import CheckpointError, JsonSettings, errors_of, read_settings, read_tensors, rehearsed, rehearsing

OWN = "attnserve_encoder_decoder"  # the key of the config in config.json
ARCHITECTURES: dict[str, tuple[type[Config], type[EncoderDecoder]]] = {
    "AttnserveRecurrentEncoderDecoder": (RecurrentConfig, RecurrentEncoderDecoder),
    "AttnserveTransformerEncoderDecoder": (TransformerConfig, TransformerEncoderDecoder),
}


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderCheckpoint:
    """A loaded model in eval mode, with the settings of its folder."""

    model: EncoderDecoder
    architecture: str
    folder: Path
    tokenizer_file: Path
    examples: tuple[str, ...]
    weights_sha256: str


def save_encoder_decoder(folder: Path, model: EncoderDecoder, *, tokenizer: str, examples: Sequence[str]) -> None:
    """Write the model to `folder`. `tokenizer` is the content of tokenizer.json. `examples` are typical sources."""
    architecture = next(name for name, (_, kind) in ARCHITECTURES.items() if isinstance(model, kind))
    config = {"architectures": [architecture], OWN: asdict(model.config), "examples": list(examples)}
    save_folder(folder, model.state_dict(), {TOKENIZER: tokenizer}, config)


@rehearsed
def load_encoder_decoder(folder: Path, *, settings: JsonSettings | None = None) -> EncoderDecoderCheckpoint:
    """Load the model in `folder`, with weights in float32. `settings` is the folder's config.json, if the caller has already read it.

    Raises CheckpointError if anything in the folder is missing, unexpected or unsupported.
    """
    settings = settings or read_settings(folder / CONFIG)
    architecture = settings.need("architectures")[0]
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{settings.file}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    kind_config, kind = ARCHITECTURES[architecture]
    with errors_of(settings.file):
        model = kind(validated(kind_config, settings.need(OWN), OWN)).eval()
    fill_places(model.state_dict(), read_tensors(folder))
    tokenizer = tokenizer_file(folder)
    examples = settings.need("examples")
    if not (isinstance(examples, list) and examples and all(isinstance(text, str) and text for text in examples)):
        raise CheckpointError(f"{settings.file}: examples={examples!r} must be one or more texts")
    return EncoderDecoderCheckpoint(
        model=model,
        architecture=architecture,
        folder=folder,
        tokenizer_file=tokenizer,
        examples=tuple(examples),
        weights_sha256="" if rehearsing() else weights_sha256(folder),
    )
