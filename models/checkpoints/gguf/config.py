"""config.json from the metadata of a GGUF file, with the keys of Hugging Face."""

from typing import Any

from models.checkpoints.gguf.file import GgufFile
from models.folders.folder import CheckpointError

# Value of general.architecture -> `architectures` and `model_type`. Mistral's models before Mistral Small 3.1 have "llama" in the file.
ARCHITECTURES = {"llama": ("LlamaForCausalLM", "llama"), "qwen2": ("Qwen2ForCausalLM", "qwen2"), "qwen3": ("Qwen3ForCausalLM", "qwen3")}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json. Raises CheckpointError for an architecture or a setting that is not supported."""
    if file.architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file.path}: the architecture {file.architecture!r} is not supported; supported: {supported}")
    name, model_type = ARCHITECTURES[file.architecture]
    prefix = file.architecture
    names = {tensor.name: tensor for tensor in file.tensors}
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{file.path} has no token_embd.weight; use another file")
    n_heads, width = file.need(f"{prefix}.attention.head_count", int), file.need(f"{prefix}.embedding_length", int)
    if n_heads < 1 or width < 1:
        raise CheckpointError(f"{file.path}: {n_heads} heads and a width of {width} are not at least 1; use another file")
    d_head = file.get(f"{prefix}.attention.key_length", int, width // n_heads)
    window = file.get(f"{prefix}.attention.sliding_window", int)
    base = file.get(f"{prefix}.rope.freq_base", float, 10_000.0)
    config = {
        "architectures": ["MistralForCausalLM" if window is not None and prefix == "llama" else name],
        "model_type": "mistral" if window is not None and prefix == "llama" else model_type,
        "vocab_size": names["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": file.need(f"{prefix}.feed_forward_length", int),
        "num_hidden_layers": file.need(f"{prefix}.block_count", int),
        "num_attention_heads": n_heads,
        "num_key_value_heads": file.get(f"{prefix}.attention.head_count_kv", int, n_heads),
        "head_dim": d_head,
        "max_position_embeddings": file.need(f"{prefix}.context_length", int),
        "rms_norm_eps": file.need(f"{prefix}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": base,
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "eos_token_id": list(eos_token_ids(file)) or None,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
    }
    if prefix == "llama":
        config["mlp_bias"] = False
    if window is not None:
        config |= {"sliding_window": window, "use_sliding_window": True}
    _check_rotation(file, prefix, d_head)
    return config


def _check_rotation(file: GgufFile, prefix: str, d_head: int) -> None:
    """Raise CheckpointError for rotary positions that are scaled or that rotate a part of a head."""
    scaling = file.get(f"{prefix}.rope.scaling.type", str, "none")
    if scaling != "none" or any(tensor.name.startswith("rope_freqs") for tensor in file.tensors):
        found = f"{prefix}.rope.scaling.type={scaling!r}" if scaling != "none" else "rope_freqs.weight"
        raise CheckpointError(f"{file.path}: {found}: scaled rotary positions are not supported; export the model's Hugging Face folder")
    if (rotated := file.get(f"{prefix}.rope.dimension_count", int, d_head)) != d_head:
        raise CheckpointError(
            f"{file.path}: {prefix}.rope.dimension_count={rotated}, but a head has {d_head} columns; export the model's Hugging Face folder"
        )


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the tokens that end a text or a turn of a chat."""
    found = (file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot"))
    return tuple(dict.fromkeys(token for token in found if token is not None))
