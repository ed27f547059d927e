"""Nomic BERT: a post-norm BERT with rotary positions and SwiGLU. Nussbaum et al. 2024, arXiv:2402.01613.

Two naming schemes exist: that of transformers (`hidden_size`, `layers.0.self_attn.q_proj`), and the older one of the
authors' own code (`n_embd`, `encoder.layers.0.attn.Wqkv`). A checkpoint may mix them: transformers writes the new
settings with the old tensor names.
"""

from typing import Any

from models.checkpoints.families.family import ACTIVATION_NAMES, Family, Names
from models.encoder.model import EncoderConfig
from models.folders.folder import JsonSettings


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    """Read the config from the keys of transformers or, in older checkpoints, from the keys of the authors' own code."""
    old = "n_embd" in settings.values
    return EncoderConfig(
        vocab_size=settings.need("vocab_size"),
        attention_bias=False,
        positions="rotary",
        n_token_types=settings.get("type_vocab_size", 2),
        gated=True,
        feedforward_bias=False,
        **(_old_keys(settings) if old else _keys(settings)),
    )


def _keys(settings: JsonSettings) -> dict[str, Any]:
    settings.allow("rope_scaling")
    rope = JsonSettings(settings.get("rope_parameters", {}), settings.file)
    rope.allow("rope_type", "default")
    return {
        "d_model": settings.need("hidden_size"),
        "n_layers": settings.need("num_hidden_layers"),
        "n_heads": settings.need("num_attention_heads"),
        "d_head": settings.get("head_dim", None),
        "d_feedforward": settings.need("intermediate_size"),
        "n_positions": settings.need("max_position_embeddings"),
        "rotary_base": rope.get("rope_theta", 1000.0),
        "norm_eps": settings.get("layer_norm_eps", 1e-12),
        "activation": settings.pick("hidden_act", "silu", ACTIVATION_NAMES),
    }


def _old_keys(settings: JsonSettings) -> dict[str, Any]:
    for off in ("prenorm", "parallel_block", "causal", "use_rms_norm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"):
        settings.allow(off, False)
    settings.allow("rotary_emb_fraction", 1, 1.0)
    settings.allow("rotary_emb_interleaved", False)
    settings.allow("rotary_emb_scale_base")
    settings.allow("rotary_scaling_factor")
    settings.allow("num_experts", 0)
    return {
        "d_model": settings.need("n_embd"),
        "n_layers": settings.need("n_layer"),
        "n_heads": settings.need("n_head"),
        "d_feedforward": settings.need("n_inner"),
        "n_positions": settings.need("n_positions"),
        "rotary_base": settings.get("rotary_emb_base", 1000.0),
        "norm_eps": settings.get("layer_norm_epsilon", 1e-12),
        "activation": settings.pick("activation_function", "swiglu", {"swiglu": "silu", "geglu": "gelu"}),
    }


NAMES: Names = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.token_type_embeddings": "embeddings.token_types",
    "embeddings.LayerNorm": "embeddings.norm",
    "layers.{i}.self_attn.q_proj": "blocks.{i}.attention.to_q",
    "layers.{i}.self_attn.k_proj": "blocks.{i}.attention.to_k",
    "layers.{i}.self_attn.v_proj": "blocks.{i}.attention.to_v",
    "layers.{i}.self_attn.o_proj": "blocks.{i}.attention.to_out",
    "layers.{i}.post_attention_layernorm": "blocks.{i}.attention_norm",
    "layers.{i}.mlp.gate_proj": "blocks.{i}.feedforward.gate",
    "layers.{i}.mlp.up_proj": "blocks.{i}.feedforward.up",
    "layers.{i}.mlp.down_proj": "blocks.{i}.feedforward.down",
    "layers.{i}.post_mlp_layernorm": "blocks.{i}.feedforward_norm",
}

OLD_NAMES: Names = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.token_type_embeddings": "embeddings.token_types",
    "emb_ln": "embeddings.norm",
    "encoder.layers.{i}.attn.Wqkv": ("blocks.{i}.attention.to_q", "blocks.{i}.attention.to_k", "blocks.{i}.attention.to_v"),
    "encoder.layers.{i}.attn.out_proj": "blocks.{i}.attention.to_out",
    "encoder.layers.{i}.norm1": "blocks.{i}.attention_norm",
    "encoder.layers.{i}.mlp.fc11": "blocks.{i}.feedforward.up",
    "encoder.layers.{i}.mlp.fc12": "blocks.{i}.feedforward.gate",
    "encoder.layers.{i}.mlp.fc2": "blocks.{i}.feedforward.down",
    "encoder.layers.{i}.norm2": "blocks.{i}.feedforward_norm",
}

NOMIC = Family(
    prefix="nomic_bert.",
    encoder_config=encoder_config,
    encoder_names=(NAMES, OLD_NAMES),
    sequence_names={"nomic_bert.pooler.dense": "transform.linear", "classifier": "classifier"},
    unused=("pooler.", "cls."),
    reads_token_types=True,
)
