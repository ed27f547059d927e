"""Builds an encoder from a YAML or JSON file that describes it, without a checkpoint. `models/configs/encoder.yaml` is an
example.

The encoder's weights are random numbers drawn with the seed in the file, unless the file names a weights file. An encoder with
random weights is enough for benchmarks and trials.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from models.checkpoints.own import TOKENIZER, fill_places
from models.checkpoints.own_encoder import encoder_config, save_encoder
from models.encoder.model import Encoder
from models.folders.byte_tokenizer import byte_tokenizer
from models.folders.folder import MOST_JSON_BYTES, CheckpointError, check_memory, in_a_line, read_text, read_tokenizer

BYTES = "bytes"


class EncoderFile(BaseModel):
    """The keys of the YAML or JSON file. Paths are relative to the file's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: dict[str, Any] = Field(description="fields of models.encoder.model.EncoderConfig, without vocab_size, which the tokenizer sets")
    tokenizer: str = Field(BYTES, description="`bytes` (one token for each of the 256 bytes), or a folder with a tokenizer.json")
    pooling: Literal["cls", "mean", "max", "last", "mean_sqrt_len"] = "mean"
    normalized: bool = True
    seed: int = Field(0, ge=0, description="seed of the random weights")
    weights: Path | None = Field(None, description="a safetensors file with the encoder's tensors by name; None: random weights")


def build_encoder(file: Path, folder: Path) -> None:
    """Build the encoder that `file` describes and save it in `folder`. Raises CheckpointError, with the value, if a value in the file is
    invalid.
    """
    asked = _read(file)
    if "vocab_size" in asked.model:
        raise CheckpointError(f"{file}: vocab_size={asked.model['vocab_size']!r} follows from the tokenizer; remove this key")
    tokenizer = _tokenizer(asked, file)
    config = encoder_config({"vocab_size": tokenizer.get_vocab_size(), **asked.model}, file)
    what = f"{file}: attention {config.attention} with {dict(config.attention_options)}"
    with torch.device("meta"):
        check_memory(file, _with_seed(lambda: Encoder(config), asked.seed, what))
    encoder = _with_seed(lambda: Encoder(config), asked.seed, what)
    if asked.weights is not None:
        fill_places(encoder.state_dict(), _tensors(file.parent / asked.weights))
    how: Mapping[str, Any] = {"pooling": asked.pooling, "normalized": asked.normalized, "untrained": asked.weights is None}
    save_encoder(folder, encoder, tokenizer=tokenizer.to_str(), **how)


def _read(file: Path) -> EncoderFile:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; models/configs/encoder.yaml is an example to begin with")
    try:
        return EncoderFile.model_validate(yaml.safe_load(read_text(file, MOST_JSON_BYTES)))
    except (yaml.YAMLError, RecursionError) as error:
        raise CheckpointError(f"{file} is neither YAML nor JSON: {in_a_line(error)}") from error
    except ValidationError as error:
        known = f"; the keys are {', '.join(EncoderFile.model_fields)}"
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']} (is {e['input']!r:.80})" for e in error.errors())
        raise CheckpointError(f"{file}: {problems}{known}") from error


def _tokenizer(asked: EncoderFile, file: Path) -> Tokenizer:
    if asked.tokenizer == BYTES:
        return byte_tokenizer()
    found = file.parent / asked.tokenizer / TOKENIZER
    if not found.is_file():
        raise CheckpointError(f"{file}: tokenizer={asked.tokenizer!r} is neither `{BYTES}` nor a folder with a {TOKENIZER} ({found})")
    return read_tokenizer(found)


def _with_seed(make: Any, seed: int, what: str) -> Encoder:
    """Return the encoder that `make()` builds with this random seed. Torch's global random state is restored afterwards. An error that
    a layer raises becomes a CheckpointError whose message begins with `what`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            encoder: Encoder = make()
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(f"{what}: {in_a_line(error)}") from error
    return encoder


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(
            f"weights={str(file)!r} is not a safetensors file ({error}); without `weights` the weights are random"
        ) from error
