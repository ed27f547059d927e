"""Reads and writes encoders in this project's own format. `description.py` writes such folders from a config file.

FOLDER/
  config.json         {"architectures": ["AttnserveEncoder"], "attnserve_encoder": {the fields of EncoderConfig},
                       "pooling": a name in POOLINGS, "normalized": bool, "untrained": bool, "softmax_tokens": int, optional}
  model.safetensors   by name, the encoder's parameters and the buffers that its layers drew at random
  tokenizer.json      in the format of the package `tokenizers`
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from models.checkpoints.own import TOKENIZER, fill_places, save_folder
from models.encoder.heads import SentenceEncoder
from models.encoder.model import Encoder, EncoderConfig
from models.encoder.pooling import POOLINGS
from models.folders.config_fields import bounded
from models.folders.folder import CheckpointError, JsonSettings, errors_of

ARCHITECTURE = "AttnserveEncoder"


@dataclass(frozen=True, kw_only=True)
class OwnEncoderConfig:
    """The content of config.json in a folder that `save_encoder` wrote."""

    config: EncoderConfig
    pooling: str
    normalized: bool
    untrained: bool  # True if the weights are random
    # Texts of up to so many tokens are computed with softmax attention to all tokens, by the same weights (`models/encoder/softmax.py`).
    softmax_tokens: int | None = None


def save_encoder(
    folder: Path,
    encoder: Encoder,
    *,
    tokenizer: str,
    pooling: str = "mean",
    normalized: bool = True,
    untrained: bool = False,
    softmax_tokens: int | None = None,
) -> None:
    """Write the encoder to `folder`. The weights keep their dtype. `tokenizer` is the content of tokenizer.json."""
    config = {
        "architectures": [ARCHITECTURE],
        "attnserve_encoder": asdict(encoder.config),
        "pooling": pooling,
        "normalized": normalized,
        "untrained": untrained,
    }
    if softmax_tokens is not None:
        config["softmax_tokens"] = softmax_tokens
    # Copies, because safetensors stores no tensor that several layers share.
    tensors = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    save_folder(folder, tensors, {TOKENIZER: tokenizer}, config)


def read_own(settings: JsonSettings) -> OwnEncoderConfig:
    """Read the config of a folder that `save_encoder` wrote. Raises CheckpointError if a field is missing or invalid."""
    config = encoder_config(settings.need("attnserve_encoder"), settings.file)
    pooling = settings.pick("pooling", "mean", {name: name for name in POOLINGS})
    flags = {name: bool(settings.get(name, default)) for name, default in (("normalized", True), ("untrained", False))}
    softmax_tokens: int | None = settings.get("softmax_tokens", None)
    if softmax_tokens is not None and softmax_tokens >= config.n_positions:
        raise CheckpointError(
            f"{settings.file}: softmax_tokens={softmax_tokens} leaves no longer text for n_positions={config.n_positions}; remove it"
        )
    return OwnEncoderConfig(config=config, pooling=pooling, softmax_tokens=softmax_tokens, **flags)


def sentence_encoder(own: OwnEncoderConfig, tensors: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> SentenceEncoder:
    """Return the sentence encoder with the config `own` and the weights `tensors`, cast to `dtype`, in eval mode. Raises CheckpointError
    if the tensors do not fit the config.
    """
    encoder = Encoder(own.config, dtype=dtype)
    fill_places(encoder.state_dict(), tensors)
    return SentenceEncoder(encoder, pooling=own.pooling, normalized=own.normalized).eval()


def encoder_config(values: Any, file: Path) -> EncoderConfig:
    """Return the EncoderConfig whose fields are `values`, read from `file`. Raises CheckpointError, with key and value, if a field is
    invalid.
    """
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: the encoder is {values!r:.80}, but must be an object with the fields of EncoderConfig")
    known = [field.name for field in fields(EncoderConfig)]
    if unknown := sorted(values.keys() - set(known)):
        raise CheckpointError(f"{file}: {unknown[0]!r} is not a field of an encoder; the fields are {', '.join(known)}")
    with errors_of(file):
        try:
            return TypeAdapter(EncoderConfig).validate_python(bounded(values))
        except ValidationError as error:
            raise ValueError("; ".join(_sentence(problem) for problem in error.errors())) from error


def _sentence(problem: Any) -> str:
    """Return one error of pydantic as text, such as "d_model: Input should be a valid integer (is 'x')". An error that concerns the
    whole config has no key, and its message already contains the values.
    """
    said, key = problem["msg"].removeprefix("Value error, "), ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{key} is missing"
    return f"{key}: {said} (is {problem['input']!r:.80})" if key else said
