"""Writes a GGUF file as a Hugging Face folder, from which the families of published decoders are read."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from models.checkpoints.gguf.config import config_of
from models.checkpoints.gguf.file import GgufFile
from models.checkpoints.gguf.tensors import PublishedTensor, published_tensors
from models.checkpoints.gguf.tokenizer import tokenizer_of
from models.checkpoints.own import CONFIG, TOKENIZER
from models.folders.folder import MOST_TEMPLATE_BYTES, WEIGHTS_INDEX, CheckpointError, in_sentences

SHARD_BYTES = 2**30  # tensors that are in memory at once, unless one tensor is larger


def unpack(path: Path, folder: Path) -> None:
    """Write config.json, tokenizer.json, chat_template.jinja and the weights of the GGUF file to `folder`.

    Tensors in F32, F16 and BF16 keep their dtype, and those in blocks become float32. So a file in blocks of 4 bits needs up to 8 times its
    size. Raises CheckpointError if the file is broken or its model is not supported, before weights are read.
    """
    file = GgufFile(path)
    with in_sentences(f"{path} cannot be read", CheckpointError):
        texts = {CONFIG: json.dumps(config_of(file), indent=1), TOKENIZER: tokenizer_of(file).to_str()}
        template = file.get("tokenizer.chat_template", str)
        if template is not None:
            if len(template.encode()) > MOST_TEMPLATE_BYTES:
                raise CheckpointError(f"{path}: the chat template has over {MOST_TEMPLATE_BYTES} bytes; use another file")
            texts["chat_template.jinja"] = template
        tensors = list(published_tensors(file))
        _check_memory(path, tensors)
        folder.mkdir(parents=True, exist_ok=True)
        _write_tensors(tensors, folder)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def _check_memory(path: Path, tensors: list[PublishedTensor]) -> None:
    n_bytes = sum(tensor.stored.size for tensor in tensors)
    if n_bytes > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise CheckpointError(f"{path}: the model has {n_bytes} bytes in float32, but this machine {memory}; use a larger machine")


def _write_tensors(tensors: list[PublishedTensor], folder: Path) -> None:
    files: dict[str, str] = {}  # name of a tensor -> name of its file
    for number, part in enumerate(_parts(tensors)):
        name = f"model-{number:05}.safetensors"
        values: dict[str, Tensor] = {tensor.name: tensor.values() for tensor in part}
        save_file(values, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(values, name)
    index = {"metadata": {"total_size": sum(file.stat().st_size for file in folder.glob("*.safetensors"))}, "weight_map": files}
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index), encoding="utf-8")


def _parts(tensors: list[PublishedTensor]) -> Iterator[list[PublishedTensor]]:
    part: list[PublishedTensor] = []
    n_bytes = 0
    for tensor in tensors:
        if part and n_bytes + tensor.stored.size > SHARD_BYTES:
            yield part
            part, n_bytes = [], 0
        part.append(tensor)
        n_bytes += tensor.stored.size
    yield part
