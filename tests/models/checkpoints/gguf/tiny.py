"""Small GGUF files of random weights, written by the package `gguf`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

WIDTH, N_HEADS, N_KV_HEADS, HIDDEN = 256, 4, 2, 512
CONTROL, USER_DEFINED, NORMAL, BYTE = 3, 4, 1, 6
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "e r", "Ġ Ġ", "ĠĠ ĠĠ", "a t", "1 2", "o r"]
BYTE_LEVEL = ["<|end|>", "<|turn|>", *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES), "<think>"]
# Where a block has its scales, as numbers of float16. All other bytes may be anything.
SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 1), "Q4_K": (0, 1), "Q5_K": (0, 1), "Q6_K": (104,)}
SCALE = {"Q8_0": 4e-4, "Q4_0": 6e-3, "Q4_1": 6e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 2e-5}


def stored(kind: str, rows: int, columns: int, random: np.random.Generator) -> NDArray[Any]:
    """Return random weights as a file of this type stores them."""
    weights = random.standard_normal((rows, columns)).astype(np.float32) * 0.05
    if kind in ("F32", "F16"):
        return weights.astype({"F32": np.float32, "F16": np.float16}[kind])
    if kind == "BF16":
        return np.ascontiguousarray((weights.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    per_block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (rows * columns // per_block, n_bytes), dtype=np.uint8)
    scales = blocks.view(np.float16)
    for place in SCALES[kind]:
        scales[:, place] = random.uniform(0.5, 1, len(blocks)) * SCALE[kind]
    if kind == "Q4_1":
        scales[:, 1] *= -8
    return blocks.reshape(rows, -1)


def tiny_gguf(
    file: Path,
    kind: str = "Q4_1",
    *,
    architecture: str = "llama",
    tied: bool = True,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[np.float32] | None] | None = None,
) -> Path:
    """Write a decoder of two layers whose matrices have this type. `fields` are further values of the metadata, `tensors` further tensors
    in F32. None leaves a value or a tensor out."""
    random = np.random.default_rng(0)
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "qwen3":
        writer.add_key_length(128)  # transformers assumes this width, whatever the file says
    writer.add_rope_freq_base(100_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(BYTE_LEVEL)
    writer.add_token_types([CONTROL, CONTROL, *[NORMAL] * (len(BYTE_LEVEL) - 3), USER_DEFINED])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}<|turn|>{% endfor %}")
    for name, value in (fields or {}).items():
        for part in writer.kv_data:
            part.pop(name, None)
        if value is None:
            continue
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        add[type(value)](name, value)
    shapes = {"token_embd": (len(BYTE_LEVEL), WIDTH)} | ({} if tied else {"output": (len(BYTE_LEVEL), WIDTH)})
    norms = {"output_norm.weight": WIDTH}
    d_head = 128 if architecture == "qwen3" else WIDTH // N_HEADS
    for i in range(2):
        q, kv = N_HEADS * d_head, N_KV_HEADS * d_head
        shapes |= {f"blk.{i}.attn_{part}": (rows, WIDTH) for part, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"blk.{i}.attn_output": (WIDTH, q), f"blk.{i}.ffn_down": (WIDTH, HIDDEN)}
        shapes |= {f"blk.{i}.ffn_{part}": (HIDDEN, WIDTH) for part in ("gate", "up")}
        norms |= {f"blk.{i}.{part}_norm.weight": WIDTH for part in ("attn", "ffn")}
        if architecture == "qwen2":
            norms |= {f"blk.{i}.attn_{part}.bias": rows for part, rows in (("q", q), ("k", kv), ("v", kv))}
        if architecture == "qwen3":
            norms |= {f"blk.{i}.attn_{part}_norm.weight": d_head for part in ("q", "k")}
    for name, shape in shapes.items():
        data = stored(kind, *shape, random)
        raw = None if kind in ("F32", "F16") else GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", data, raw_dtype=raw)
    others = {name: random.uniform(0.5, 1.5, size).astype(np.float32) for name, size in norms.items()} | dict(tensors or {})
    for name, data in others.items():
        if data is not None:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
