"""The text decoder of the dense Qwen3.5 models: every three blocks with the gated delta rule are followed by one with gated softmax
attention. Qwen Team 2026.

If all layers of a checkpoint are linear attention, its state has constant size, and it can be exported and served. The published
checkpoints also have full attention layers, whose state grows with the text. They can be read, trained and run in torch, but not
exported.
"""

from functools import partial

from torch import Tensor

from models.checkpoints.families.decoder_family import DecoderFamily, PublishedTensor, from_zero
from models.decoder.model import DecoderConfig
from models.folders.folder import CheckpointError, JsonSettings

LAYER_NAMES = {"linear_attention": "gated_delta", "full_attention": "gated_softmax"}


def decoder_config(settings: JsonSettings) -> DecoderConfig:
    """Return the DecoderConfig of a text-only config.json, or of the `text_config` in a config.json with a `vision_config`."""
    text = JsonSettings(settings.get("text_config", settings.values), settings.file)
    text.allow("hidden_act", "silu")
    text.allow("attention_bias", False)
    text.allow("attn_output_gate", True)
    layers = _layers(text)
    norm_eps = text.get("rms_norm_eps", 1e-6)
    linear = {
        "n_heads": text.need("linear_num_value_heads"),
        "n_key_heads": text.need("linear_num_key_heads"),
        "d_head": text.need("linear_key_head_dim"),
        "d_value": text.need("linear_value_head_dim"),
        "kernel": text.need("linear_conv_kernel_dim"),
        "norm_eps": norm_eps,
    }
    full = {"n_kv_heads": text.need("num_key_value_heads"), "norm_eps": norm_eps}
    options = {"gated_delta": linear, "gated_softmax": full}
    d_head = text.get("head_dim", 256)
    rope = _rope(text)
    return DecoderConfig(
        vocab_size=text.need("vocab_size"),
        d_model=text.need("hidden_size"),
        n_layers=len(layers),
        n_heads=text.need("num_attention_heads"),
        d_head=d_head,
        d_feedforward=text.need("intermediate_size"),
        layers=layers,
        layer_options={name: options[name] for name in sorted(set(layers))},
        positions="rotary" if "gated_softmax" in layers else "none",
        rotary_base=rope.get("rope_theta", 10_000.0),
        rotary_width=int(d_head * rope.get("partial_rotary_factor", 0.25)),
        norm_eps=norm_eps,
        tied=settings.get("tie_word_embeddings", False),
    )


def _layers(text: JsonSettings) -> tuple[str, ...]:
    """Return the names of the layers, in order, as keys of LAYERS. They are read from `layer_types`. If that is missing, every
    `full_attention_interval`-th layer has full attention and the others have linear attention.
    """
    every, n_layers = text.get("full_attention_interval", 4), text.need("num_hidden_layers")
    types = text.get("layer_types", ["full_attention" if i % every == 0 else "linear_attention" for i in range(1, n_layers + 1)])
    for name in types:
        if name not in LAYER_NAMES:
            raise CheckpointError(f"{text.file}: layer_types has {name!r}; supported: {', '.join(LAYER_NAMES)}; use another checkpoint")
    if len(types) != n_layers:
        raise CheckpointError(f"{text.file}: layer_types has {len(types)} entries for num_hidden_layers={n_layers}; copy it again")
    return tuple(LAYER_NAMES[name] for name in types)


def _rope(text: JsonSettings) -> JsonSettings:
    """Return the rotary settings. `mrope_section` is ignored, as it only matters for image tokens, which have 3 positions each (time,
    height, width).
    """
    text.allow("rope_scaling")
    rope = JsonSettings(text.get("rope_parameters", {}), text.file)
    rope.allow("rope_type", "default")
    return rope


def sources(config: DecoderConfig) -> list[PublishedTensor]:
    found = [
        PublishedTensor("model.embed_tokens.weight", ("embedding.weight",)),
        PublishedTensor("model.norm.weight", ("final_norm.weight",), from_zero),
    ]
    if not config.tied:
        found.append(PublishedTensor("lm_head.weight", ("unembedding.weight",)))
    of_layer = {"gated_delta": LINEAR, "gated_softmax": _full(config.n_heads)}
    for i, layer in enumerate(config.layer_names):
        for source in EVERY_BLOCK + of_layer[layer]:
            ours = tuple(f"blocks.{i}.{name}" for name in source.ours)
            found.append(PublishedTensor(f"model.layers.{i}.{source.theirs}", ours, source.read))
    return found


def _gates_last(n_heads: int, weight: Tensor) -> Tensor:
    """Reorder the rows of a weight (H * 2 * D_k, D). In the checkpoint they are q of head 1, gate of head 1, q of head 2, and so on. In
    the result the rows of q of all heads come first, then the rows of the gates of all heads."""
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(0, 1).flatten(0, 2)


EVERY_BLOCK = (
    PublishedTensor("input_layernorm.weight", ("layer_norm.weight",), from_zero),
    PublishedTensor("post_attention_layernorm.weight", ("feedforward_norm.weight",), from_zero),
    PublishedTensor("mlp.gate_proj.weight", ("feedforward.gate.weight",)),
    PublishedTensor("mlp.up_proj.weight", ("feedforward.up.weight",)),
    PublishedTensor("mlp.down_proj.weight", ("feedforward.down.weight",)),
)

LINEAR = (
    PublishedTensor("linear_attn.in_proj_qkv.weight", ("layer.to_q.weight", "layer.to_k.weight", "layer.to_v.weight")),
    PublishedTensor("linear_attn.conv1d.weight", ("layer.convolution.weight",)),
    PublishedTensor("linear_attn.in_proj_z.weight", ("layer.to_gate.weight",)),
    PublishedTensor("linear_attn.in_proj_b.weight", ("layer.to_beta.weight",)),
    PublishedTensor("linear_attn.in_proj_a.weight", ("layer.to_decay.weight",)),
    PublishedTensor("linear_attn.A_log", ("layer.A_log",)),
    PublishedTensor("linear_attn.dt_bias", ("layer.dt_bias",)),
    PublishedTensor("linear_attn.norm.weight", ("layer.norm.weight",)),
    PublishedTensor("linear_attn.out_proj.weight", ("layer.to_out.weight",)),
)


def _full(n_heads: int) -> tuple[PublishedTensor, ...]:
    return (
        PublishedTensor("self_attn.q_proj.weight", ("layer.to_q.weight", "layer.to_gate.weight"), partial(_gates_last, n_heads)),
        PublishedTensor("self_attn.k_proj.weight", ("layer.to_k.weight",)),
        PublishedTensor("self_attn.v_proj.weight", ("layer.to_v.weight",)),
        PublishedTensor("self_attn.q_norm.weight", ("layer.q_norm.weight",), from_zero),
        PublishedTensor("self_attn.k_norm.weight", ("layer.k_norm.weight",), from_zero),
        PublishedTensor("self_attn.o_proj.weight", ("layer.to_out.weight",)),
    )


QWEN3_5 = DecoderFamily(
    decoder_config=decoder_config,
    sources=sources,
    prefix="model.",
    prefix_beside_vision="model.language_model.",
    # These are the vision encoder, the multi-token prediction head, and the copy of a tied embedding.
    unused=("model.visual.", "mtp.", "lm_head."),
)
