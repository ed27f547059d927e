"""An encoder-decoder as a folder, written by training and read by the export.

FOLDER/
  config.json           {"architectures": [its class], "attnserve_encoder_decoder": {the fields of its config},
                         "examples": [sources that it was made for, which a bundle of it proves itself by]}
  model.safetensors     the parameters by name
  tokenizer.json        of `tokenizers`
  README.md             the model card, optional
"""

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.checkpoints.decoder import weights_sha256
from models.checkpoints.weights import check_names, copy_rows
from models.encoder_decoder.config import Config, RecurrentConfig, TransformerConfig
from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.recurrent import RecurrentEncoderDecoder
from models.encoder_decoder.transformer import TransformerEncoderDecoder
from models.folders.config_fields import validated
from models.folders.folder import (
    MOST_TOKENIZER_BYTES,
    WEIGHTS,
    CheckpointError,
    Settings,
    present,
    read_settings,
    read_tensors,
    regular,
    rehearsed,
    rehearsing,
)

CONFIG, TOKENIZER, CARD = "config.json", "tokenizer.json", "README.md"
ARCHITECTURES: dict[str, tuple[type[Config], type[EncoderDecoder]]] = {
    "AttnserveRecurrentEncoderDecoder": (RecurrentConfig, RecurrentEncoderDecoder),
    "AttnserveTransformerEncoderDecoder": (TransformerConfig, TransformerEncoderDecoder),
}


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderCheckpoint:
    """A loaded model, in eval mode, with the settings of its folder."""

    model: EncoderDecoder
    architecture: str
    folder: Path
    tokenizer_file: Path
    examples: tuple[str, ...]
    weights_sha256: str


def save_encoder_decoder(folder: Path, model: EncoderDecoder, *, tokenizer: str, examples: Sequence[str]) -> None:
    """Write `folder`. `tokenizer` is the text of its file. config.json comes last: a folder that was not finished is no checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / WEIGHTS)
    (folder / TOKENIZER).write_text(tokenizer, encoding="utf-8")
    architecture = next(name for name, (_, kind) in ARCHITECTURES.items() if isinstance(model, kind))
    config = {"architectures": [architecture], "attnserve_encoder_decoder": asdict(model.config), "examples": list(examples)}
    (folder / CONFIG).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@rehearsed
def load_encoder_decoder(folder: Path, *, settings: Settings | None = None) -> EncoderDecoderCheckpoint:
    """Read `folder`, its weights in float32. `settings` are those of its config.json, if read.

    Raises CheckpointError for everything that is missing, unexpected or unsupported there.
    """
    settings = settings or read_settings(folder / CONFIG)
    architecture = settings.need("architectures")[0]
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{settings.file}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    kind_config, kind = ARCHITECTURES[architecture]
    try:
        model = kind(_config(settings, kind_config)).eval()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{settings.file}: {error}") from error
    tensors, places = read_tensors(folder), model.state_dict()
    check_names({name: [name] for name in places}, tensors, harmless=())
    with torch.no_grad():
        for name, place in places.items():
            copy_rows(tensors[name], [place], name)
    tokenizer_file = folder / TOKENIZER
    if not present(tokenizer_file):
        raise CheckpointError(f"{tokenizer_file} is missing; copy it from where the model was saved")
    regular(tokenizer_file, most_bytes=MOST_TOKENIZER_BYTES)
    examples = settings.need("examples")
    if not (isinstance(examples, list) and examples and all(isinstance(text, str) and text for text in examples)):
        raise CheckpointError(f"{settings.file}: examples={examples!r} must be one or more texts")
    return EncoderDecoderCheckpoint(
        model=model,
        architecture=architecture,
        folder=folder,
        tokenizer_file=tokenizer_file,
        examples=tuple(examples),
        weights_sha256="" if rehearsing() else weights_sha256(folder),
    )


def _config(settings: Settings, kind: type[Config]) -> Config:
    """Raises ValueError for an unknown or missing field."""
    values = settings.need("attnserve_encoder_decoder")
    known = {field.name: field for field in fields(kind)}
    if unknown := values.keys() - known.keys():
        raise ValueError(f"attnserve_encoder_decoder has {min(unknown)!r}, which is not one of {', '.join(known)}")
    if missing := {name for name, field in known.items() if field.default is MISSING} - values.keys():
        raise ValueError(f"attnserve_encoder_decoder has no {min(missing)!r}")
    return validated(kind, values)
