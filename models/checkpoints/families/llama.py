"""Decoders with softmax attention in the form of Llama: pre-norm blocks with RMS norms, rotary positions, grouped heads and a gated
feed-forward layer.

Llama (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783; SmolLM and SmolLM2 have its form), Mistral (Jiang et al. 2023,
arXiv:2310.06825: a sliding window), Qwen2 (arXiv:2407.10671: biases of q, k and v), Qwen3 (arXiv:2505.09388: normalised q and k, heads of
another width than D / H) and Gemma (arXiv:2403.08295: scaled embeddings, norms that multiply by 1 + weight, GeGLU).

A layer of full attention has a state that grows with the text. A layer with a sliding window has a state of constant size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from models.checkpoints.families.decoder_family import DecoderFamily, PublishedTensor, from_zero, unchanged
from models.checkpoints.families.rope import read_rope
from models.decoder.model import DecoderConfig
from models.folders.folder import CheckpointError, JsonSettings

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
FULL, WINDOW = "causal_softmax", "sliding_window"
LAYER_NAMES = {"full_attention": FULL, "sliding_attention": WINDOW}


def llama(settings: JsonSettings) -> DecoderConfig:
    bias = settings.get("attention_bias", False)
    return _config(settings, {"bias": bias, "out_bias": bias}, bias=settings.get("mlp_bias", False))


def mistral(settings: JsonSettings) -> DecoderConfig:
    """Every layer has a sliding window if the settings have `sliding_window`, as in Mistral 7B v0.1."""
    window = settings.get("sliding_window", None)
    return _config(settings, {}, layer_type="full_attention" if window is None else "sliding_attention", window=window)


def qwen2(settings: JsonSettings) -> DecoderConfig:
    return _config(settings, {"bias": True, "out_bias": False}, **_windows(settings))


def qwen3(settings: JsonSettings) -> DecoderConfig:
    bias = settings.get("attention_bias", False)
    attention = {"bias": bias, "out_bias": bias, "qk_norm": True, "norm_eps": settings.get("rms_norm_eps", 1e-6)}
    return _config(settings, attention, d_head=128, **_windows(settings))


def gemma(settings: JsonSettings) -> DecoderConfig:
    """The first Gemma. Gemma 2 and later have other blocks. Its `hidden_act` of "gelu" stands for the approximation by tanh."""
    settings.allow("use_bidirectional_attention", False)
    settings.pick("hidden_act", "gelu", ACTIVATIONS)
    bias = settings.get("attention_bias", False)
    scale = settings.need("hidden_size") ** 0.5
    return _config(settings, {"bias": bias, "out_bias": bias}, d_head=256, tied=True, activation="gelu_tanh", embedding_scale=scale)


def _windows(settings: JsonSettings) -> dict[str, Any]:
    """Return the layers of a Qwen with and without windows. Without `layer_types`, the first `max_window_layers` have full attention."""
    used = settings.get("use_sliding_window", False)
    window = settings.get("sliding_window", 4096) if used else None
    n_layers, n_full = settings.need("num_hidden_layers"), settings.get("max_window_layers", 28)
    default = ["full_attention" if window is None or i < n_full else "sliding_attention" for i in range(n_layers)]
    return {"layer_type": settings.get("layer_types", default), "window": window}


def _config(
    settings: JsonSettings,
    attention: dict[str, Any],
    *,
    layer_type: str | list[str] = "full_attention",
    window: int | None = None,
    d_head: int | None = None,
    tied: bool = False,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a decoder whose layers have the options `attention`. d_head and tied are the family's defaults, layer_type the
    type of all layers or of each, and `fields` further fields of DecoderConfig.
    """
    if (quantised := settings.values.get("quantization_config")) is not None:
        raise CheckpointError(
            f"{settings.file}: quantization_config={quantised!r:.80} is not supported; use a checkpoint with float weights, or a GGUF file"
        )
    n_heads, n_layers = settings.need("num_attention_heads"), settings.need("num_hidden_layers")
    types = [layer_type] * n_layers if isinstance(layer_type, str) else layer_type
    if len(types) != n_layers:
        raise CheckpointError(f"{settings.file}: layer_types has {len(types)} entries for num_hidden_layers={n_layers}; copy it again")
    layers = tuple(_layer_name(name, window, settings) for name in types)
    options = attention | {"n_kv_heads": settings.get("num_key_value_heads", n_heads)}
    own: dict[str, Any] = {"activation": settings.pick("hidden_act", "silu", ACTIVATIONS)} | read_rope(settings) | fields
    return DecoderConfig(
        vocab_size=settings.need("vocab_size"),
        d_model=settings.need("hidden_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        d_head=settings.get("head_dim", d_head),
        d_feedforward=settings.need("intermediate_size"),
        layers=layers,
        layer_options={name: options | ({"window": window} if name == WINDOW else {}) for name in sorted(set(layers))},
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        tied=settings.get("tie_word_embeddings", tied),
        **own,
    )


def _layer_name(name: str, window: int | None, settings: JsonSettings) -> str:
    if name not in LAYER_NAMES:
        raise CheckpointError(f"{settings.file}: layer_types has {name!r}; supported: {', '.join(LAYER_NAMES)}; use another checkpoint")
    if LAYER_NAMES[name] == WINDOW and window is None:
        raise CheckpointError(f"{settings.file}: layer_types has {name!r}, but no sliding_window is in use; set both, or copy it again")
    return LAYER_NAMES[name]


def sources(config: DecoderConfig, *, norm: Callable[[Tensor], Tensor] = unchanged) -> list[PublishedTensor]:
    """Return all tensors of a checkpoint with `config`. `norm` converts the weights of norms."""
    found = [
        PublishedTensor("model.embed_tokens.weight", ("embedding.weight",)),
        PublishedTensor("model.norm.weight", ("final_norm.weight",), norm),
    ]
    if not config.tied:
        found.append(PublishedTensor("lm_head.weight", ("unembedding.weight",)))
    for i, layer in enumerate(config.layer_names):
        attention = config.layer_options[layer]
        theirs = {
            "input_layernorm.weight": "layer_norm.weight",
            "post_attention_layernorm.weight": "feedforward_norm.weight",
            **_linear("self_attn.{}_proj", "layer.to_{}", {part: part for part in "qkv"}, bias=attention.get("bias", False)),
            **_linear("self_attn.{}_proj", "layer.to_{}", {"o": "out"}, bias=attention.get("out_bias", False)),
            **_linear("mlp.{}_proj", "feedforward.{}", {part: part for part in ("gate", "up", "down")}, bias=config.bias),
        }
        if attention.get("qk_norm", False):
            theirs |= {f"self_attn.{part}_norm.weight": f"layer.{part}_norm.weight" for part in "qk"}
        for name, ours in theirs.items():
            found.append(PublishedTensor(f"model.layers.{i}.{name}", (f"blocks.{i}.{ours}",), norm if "norm" in name else unchanged))
    return found


def _linear(theirs: str, ours: str, parts: dict[str, str], *, bias: bool) -> dict[str, str]:
    """Return the published names of linear maps -> our names. `parts` fills the braces of `theirs` and of `ours`."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{theirs.format(t)}.{kind}": f"{ours.format(o)}.{kind}" for t, o in parts.items() for kind in kinds}


def _family(config: Callable[[JsonSettings], DecoderConfig], **options: Any) -> DecoderFamily:
    return DecoderFamily(decoder_config=config, sources=partial(sources, **options), prefix="model.", unused=("lm_head.",))


LLAMA = _family(llama)
MISTRAL = _family(mistral)
QWEN2 = _family(qwen2)
QWEN3 = _family(qwen3)
GEMMA = _family(gemma, norm=from_zero)
