"""The tensors of a GGUF file under their names in Hugging Face folders, with the rows in the order that they have there."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.checkpoints.gguf.file import GgufFile, StoredTensor
from models.folders.folder import CheckpointError

NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_LAYER = re.compile(r"blk\.([0-9]{1,4})\.([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor of the file, with its name in a Hugging Face folder."""

    name: str
    stored: StoredTensor
    rows: NDArray[np.intp] | None  # number of the row in the file, for each row; None: the order is the same

    def values(self) -> Tensor:
        values = self.stored.values()
        return values if self.rows is None else values[torch.from_numpy(self.rows)]

    def weights(self) -> NDArray[np.float32]:
        """Return the numbers in float32."""
        weights = self.stored.weights()
        return weights if self.rows is None else weights[self.rows]


def published_tensors(file: GgufFile) -> Iterator[PublishedTensor]:
    """Yield all tensors. Raises CheckpointError for a tensor that models of this architecture do not have."""
    prefix = file.architecture
    n_heads = file.need(f"{prefix}.attention.head_count", int)
    heads = {"attn_q": n_heads, "attn_k": file.get(f"{prefix}.attention.head_count_kv", int, n_heads)}
    for stored in file.tensors:
        found = _OF_LAYER.fullmatch(stored.name)
        part = None if found is None else found[2]
        if stored.name in NAMES:
            name = NAMES[stored.name]
        elif found is not None and part in PARTS:
            name = f"model.layers.{int(found[1])}.{PARTS[part]}.{found[3]}"
        else:
            raise CheckpointError(f"{file.path}: the tensor {stored.name!r:.80} is not known; use another file")
        rows = _rows(file, stored, heads[part]) if prefix == "llama" and part in heads else None
        yield PublishedTensor(name, stored, rows)


def _rows(file: GgufFile, stored: StoredTensor, n_heads: int) -> NDArray[np.intp]:
    """Return the order of the rows of q or k in Hugging Face folders, where a rotated pair is in rows i and i + d_head / 2 of a head. In
    the file it is in rows 2 i and 2 i + 1."""
    rows = stored.shape[0]
    if n_heads < 1 or rows % (2 * n_heads):
        raise CheckpointError(
            f"{file.path}: {stored.name} has {rows} rows, which are not pairs of rows of {n_heads} heads; use another file"
        )
    return np.arange(rows).reshape(n_heads, rows // n_heads // 2, 2).swapaxes(1, 2).reshape(rows)
