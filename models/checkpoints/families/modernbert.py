"""ModernBERT: pre-norm, rotary positions, GeGLU, local windows in most layers. Warner et al. 2024, arXiv:2412.13663."""

from models.checkpoints.families.family import ACTIVATION_NAMES, Family, HeadConfig, Names
from models.encoder.model import EncoderConfig
from models.folders.folder import CheckpointError, JsonSettings

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    n_layers = settings.need("num_hidden_layers")
    half_window = settings.get("local_attention", 128) // 2
    return EncoderConfig(
        vocab_size=settings.need("vocab_size"),
        d_model=settings.need("hidden_size"),
        n_layers=n_layers,
        n_heads=settings.need("num_attention_heads"),
        d_feedforward=settings.need("intermediate_size"),
        n_positions=settings.need("max_position_embeddings"),
        attention_bias=settings.get("attention_bias", False),
        positions="rotary",
        rotary_base=_rotary_base(settings, GLOBAL, "global_rope_theta", 160_000.0),
        local_rotary_base=_rotary_base(settings, LOCAL, "local_rope_theta", 10_000.0),
        windows=tuple(half_window if kind == LOCAL else None for kind in _layer_types(settings, n_layers)),
        norm="pre",
        norm_eps=settings.get("norm_eps", 1e-5),
        norm_bias=settings.get("norm_bias", False),
        final_norm=True,
        activation=settings.pick("hidden_activation", "gelu", ACTIVATION_NAMES),
        gated=True,
        feedforward_bias=settings.get("mlp_bias", False),
    )


def _layer_types(settings: JsonSettings, n_layers: int) -> list[str]:
    """Return the type of every layer, LOCAL or GLOBAL. It is read from `layer_types`. Older configs have `global_attn_every_n_layers`
    instead: layers 0, n, 2n, .. are global.
    """
    every = settings.get("global_attn_every_n_layers", 3)
    types = settings.get("layer_types", [LOCAL if i % every else GLOBAL for i in range(n_layers)])
    unknown = sorted(set(types) - {LOCAL, GLOBAL})
    if unknown:
        raise CheckpointError(f"{settings.file}: layer_types has {unknown[0]!r}; supported: {LOCAL}, {GLOBAL}; use another checkpoint")
    return types


def _rotary_base(settings: JsonSettings, kind: str, old_key: str, default: float) -> float:
    """Return the rotary base of the layers of type `kind`, LOCAL or GLOBAL. It is read from `rope_parameters`, in older configs from
    `old_key`.
    """
    settings.allow("rope_scaling")
    rope = JsonSettings(settings.get("rope_parameters", {}).get(kind) or {}, settings.file)
    rope.allow("rope_type", "default")
    return rope.get("rope_theta", settings.get(old_key, default))


ENCODER_NAMES: Names = {
    "embeddings.tok_embeddings": "embeddings.tokens",
    "embeddings.norm": "embeddings.norm",
    "layers.{i}.attn_norm": "blocks.{i}.attention_norm",
    "layers.{i}.attn.Wqkv": ("blocks.{i}.attention.to_q", "blocks.{i}.attention.to_k", "blocks.{i}.attention.to_v"),
    "layers.{i}.attn.Wo": "blocks.{i}.attention.to_out",
    "layers.{i}.mlp_norm": "blocks.{i}.feedforward_norm",
    "layers.{i}.mlp.Wi": ("blocks.{i}.feedforward.gate", "blocks.{i}.feedforward.up"),
    "layers.{i}.mlp.Wo": "blocks.{i}.feedforward.down",
    "final_norm": "final_norm",
}

HEAD_NAMES: Names = {"head.dense": "transform.linear", "head.norm": "transform.norm", "classifier": "classifier"}


def _head(settings: JsonSettings) -> HeadConfig:
    return HeadConfig(
        pooling=settings.pick("classifier_pooling", "cls", {"cls": "cls", "mean": "mean"}),
        activation=settings.pick("classifier_activation", "gelu", ACTIVATION_NAMES),
        bias=settings.get("classifier_bias", False),
        norm=True,
    )


MODERNBERT = Family(
    prefix="model.",
    encoder_config=encoder_config,
    encoder_names=(ENCODER_NAMES,),
    sequence_head=_head,
    sequence_names=HEAD_NAMES,
    token_head=_head,
    token_names=HEAD_NAMES,
    unused=("head.", "decoder."),
    pad_token_id=50283,
)
