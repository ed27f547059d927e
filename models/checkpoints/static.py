"""Reads static embeddings from a folder, in one of three forms.

- sentence-transformers: `modules.json` lists StaticEmbedding, whose folder has tokenizer.json and model.safetensors (`embedding.weight`).
- model2vec: config.json has `model_type: model2vec`, model.safetensors has `embeddings` and may have `weights`, one for each token, and
  `mapping`, the row of each token. Unknown tokens are left out of the mean, as the package model2vec does.
- wordllama: the folder of the installed package, with weights/NAME_DIM.safetensors and tokenizers/NAME_tokenizer_config.json.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.encoder.pipeline import Pipeline
from models.encoder.static import StaticEncoder, StaticShape, StaticTable
from models.folders.folder import (
    MOST_TOKENIZER_BYTES,
    WEIGHTS,
    CheckpointError,
    JsonSettings,
    read_safetensors,
    read_settings,
    read_tensors,
    read_tokenizer,
    regular,
    rehearsing,
)

# None of the forms limits the length of a text. A service needs a limit, because a run takes memory for each token: 32 MB for 8,192 tokens
# of width 1,024.
LONGEST = 8192
LONGEST_OF_MODEL2VEC = 512  # if config.json has no `max_length`
ARCHITECTURE = "StaticEmbedding"


@dataclass(frozen=True, kw_only=True)
class StaticFiles:
    """The files of a static embedding, and the settings beside them."""

    weights: Path
    tokenizer: Path
    max_tokens: int = LONGEST
    normalized: bool = False
    skips_unknown: bool = False


def find_static(folder: Path, pipeline: Pipeline, config: JsonSettings) -> StaticFiles | None:
    """Return the files of the static embedding in `folder`, or None if the folder has another kind of model. `config`: the settings of
    config.json, empty if there is none.
    """
    place = pipeline.transformer
    if config.values.get("model_type") == "model2vec":
        return StaticFiles(
            weights=place / WEIGHTS,
            tokenizer=place / "tokenizer.json",
            max_tokens=int(min(_max_length(config), LONGEST)),
            normalized=pipeline.normalized or config.get("normalize", False),
            skips_unknown=True,
        )
    if pipeline.static:
        return StaticFiles(weights=place / WEIGHTS, tokenizer=place / "tokenizer.json", normalized=pipeline.normalized)
    return None if config.values else _wordllama(folder)


def _max_length(config: JsonSettings) -> float:
    """Return the longest text in tokens. In model2vec's config, null stands for no limit."""
    return LONGEST if config.values.get("max_length", 0) is None else config.get("max_length", LONGEST_OF_MODEL2VEC)


def _wordllama(folder: Path) -> StaticFiles | None:
    weights, tokenizers = sorted(folder.glob("weights/*.safetensors")), sorted(folder.glob("tokenizers/*_tokenizer_config.json"))
    if not weights or not tokenizers:
        return None
    if len(weights) > 1 or len(tokenizers) > 1:
        raise CheckpointError(
            f"{folder} has {len(weights)} files of weights and {len(tokenizers)} tokenizers; keep one of each to choose the model"
        )
    return StaticFiles(weights=weights[0], tokenizer=tokenizers[0])


def load_static(files: StaticFiles, pipeline: Pipeline, *, dtype: torch.dtype) -> StaticEncoder:
    """Return the model, in eval mode. Raises CheckpointError if tensors are missing, unexpected, or do not fit each other or the
    tokenizer.
    """
    tensors = read_tensors(files.weights.parent) if files.weights.name == WEIGHTS else read_safetensors(files.weights)
    name = "embedding.weight" if "embedding.weight" in tensors else "embeddings"
    weights, mapping = tensors.get("weights"), tensors.get("mapping")
    if name not in tensors or tensors.keys() - {name, "weights", "mapping"}:
        found = ", ".join(sorted(tensors)[:5]) or "nothing"
        raise CheckpointError(f"{files.weights} has {found}, but a static embedding has embedding.weight or embeddings; copy it again")
    vectors = tensors[name]
    _check(files.weights, name, vectors, dims=2)
    vocab_size = len(vectors) if mapping is None else mapping.numel()
    for other, tensor in (("weights", weights), ("mapping", mapping)):
        if tensor is not None:
            _check(files.weights, other, tensor, dims=1, length=vocab_size)
    if mapping is not None:
        _check_rows(files.weights, mapping, len(vectors))
    tokenizer = read_tokenizer(regular(files.tokenizer, most_bytes=MOST_TOKENIZER_BYTES))
    if (size := max(tokenizer.get_vocab().values(), default=-1) + 1) > vocab_size:
        raise CheckpointError(f"{files.tokenizer} has {size} tokens, but {files.weights} vectors for {vocab_size}; copy both again")
    shape = StaticShape(
        vocab_size=vocab_size,
        d_model=vectors.shape[1],
        n_positions=files.max_tokens,
        n_rows=len(vectors),
        weighted=weights is not None,
        shared=mapping is not None,
        unknown_id=unknown_id(files.tokenizer) if files.skips_unknown else None,
    )
    table = StaticTable(shape).to(dtype)
    with torch.no_grad():
        table.vectors.weight[:-1].copy_(vectors)
        table.vectors.weight[-1].zero_()
        if table.row_of is not None and mapping is not None:
            table.row_of[:-1].copy_(mapping)
        if table.weights is not None and weights is not None:
            table.weights[:-1, 0].copy_(weights)
    return StaticEncoder(table, dense=pipeline.dense, normalized=files.normalized).to(dtype).eval()


def unknown_id(file: Path) -> int | None:
    """Return the id of the unknown token of the tokenizer in `file`, or None if it has none."""
    model = read_settings(file, most_bytes=MOST_TOKENIZER_BYTES).values.get("model") or {}
    if isinstance(number := model.get("unk_id"), int):
        return number
    token = model.get("unk_token")
    return read_tokenizer(file).token_to_id(token) if isinstance(token, str) else None


def without_special_tokens(file: Path) -> str:
    """Return the tokenizer in `file` as text, without the part that adds special tokens to a text, which would count in its mean."""
    values = read_settings(file, most_bytes=MOST_TOKENIZER_BYTES).values
    return json.dumps(values | {"post_processor": None, "truncation": None, "padding": None}, ensure_ascii=False)


def _check(file: Path, name: str, tensor: Tensor, *, dims: int, length: int | None = None) -> None:
    if tensor.dim() != dims or 0 in tensor.shape or (length is not None and len(tensor) != length):
        wanted = f"({length},)" if length is not None else "(tokens, width)"
        raise CheckpointError(f"{file}: {name} has the shape {tuple(tensor.shape)}, but must have {wanted}; copy it again")


def _check_rows(file: Path, mapping: Tensor, n_rows: int) -> None:
    if mapping.is_floating_point():
        raise CheckpointError(f"{file}: mapping has the type {mapping.dtype}, but must have whole numbers; copy it again")
    if not rehearsing() and len(wrong := mapping[(mapping < 0) | (mapping >= n_rows)]):
        raise CheckpointError(f"{file}: mapping names row {int(wrong[0])}, but there are {n_rows}; copy it again")
