"""An encoder as a folder of our own kind: what a config file is built into (encoder_file.py), and what training may write.

FOLDER/
  config.json         {"architectures": ["AttnserveEncoder"], "attnserve_encoder": {the fields of EncoderConfig},
                       "pooling": a name in POOLINGS, "normalized": bool, "untrained": bool}
  model.safetensors   the encoder's parameters and what its layers have drawn, by name
  tokenizer.json      of `tokenizers`
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoints.weights import check_names, copy_rows
from models.encoder.heads import SentenceEncoder
from models.encoder.model import Encoder, EncoderConfig
from models.encoder.pooling import POOLINGS
from models.folders.config_fields import bounded
from models.folders.folder import WEIGHTS, CheckpointError, Settings

ARCHITECTURE = "AttnserveEncoder"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Own:
    """The description of the encoder in a folder of our own, without weights."""

    config: EncoderConfig
    pooling: str
    normalized: bool
    untrained: bool


def save_encoder(
    folder: Path, encoder: Encoder, *, tokenizer: str, pooling: str = "mean", normalized: bool = True, untrained: bool = False
) -> None:
    """Write `folder`, with the weights in their present dtype. `tokenizer` is the text of its file.

    config.json comes last: a folder that was not finished is no checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in encoder.state_dict().items()}, folder / WEIGHTS)
    (folder / TOKENIZER).write_text(tokenizer, encoding="utf-8")
    config = {
        "architectures": [ARCHITECTURE],
        "attnserve_encoder": asdict(encoder.config),
        "pooling": pooling,
        "normalized": normalized,
        "untrained": untrained,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def read_own(settings: Settings) -> Own:
    """Of config.json. Raises CheckpointError, with the value, for fields that are missing or do not fit together."""
    config = encoder_config(settings.need("attnserve_encoder"), settings.file)
    pooling = settings.pick("pooling", "mean", {name: name for name in POOLINGS})
    flags = {name: bool(settings.get(name, default)) for name, default in (("normalized", True), ("untrained", False))}
    return Own(config=config, pooling=pooling, **flags)


def sentence_encoder(own: Own, tensors: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> SentenceEncoder:
    """The model, in eval mode, with these weights cast to `dtype`. Raises CheckpointError for weights that are not its own."""
    encoder = Encoder(own.config, dtype=dtype)
    fill_encoder(encoder, tensors)
    return SentenceEncoder(encoder, pooling=own.pooling, normalized=own.normalized).eval()


def fill_encoder(encoder: Encoder, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of its state_dict into `encoder`. Raises CheckpointError for missing and unexpected ones and other shapes."""
    places = encoder.state_dict()  # memory shared with it
    check_names({name: [name] for name in places}, dict(tensors), harmless=())
    with torch.no_grad():
        for name, place in places.items():
            copy_rows(tensors[name], [place], name)


def encoder_config(values: Any, file: Path) -> EncoderConfig:
    """The fields of EncoderConfig from a file. Raises CheckpointError, which names the key and the value, for any that do not fit."""
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: the encoder is {values!r:.80}, and should be the fields of EncoderConfig by name")
    known = [field.name for field in fields(EncoderConfig)]
    if unknown := sorted(values.keys() - set(known)):
        raise CheckpointError(f"{file}: {unknown[0]!r} is no field of an encoder; there are {', '.join(known)}")
    try:
        return TypeAdapter(EncoderConfig).validate_python(bounded(values))
    except ValidationError as error:
        told = "; ".join(_sentence(problem) for problem in error.errors())
        raise CheckpointError(f"{file}: {told}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _sentence(problem: Any) -> str:
    """ "d_model: Input should be a valid integer (is 'x')"; what a shape as a whole complains of says its values itself."""
    said, key = problem["msg"].removeprefix("Value error, "), ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{key} is missing"
    return f"{key}: {said} (is {problem['input']!r:.80})" if key else said
