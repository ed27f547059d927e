"""DeBERTa-v2 and DeBERTaV3: a BERT with disentangled attention. He et al. 2020, arXiv:2006.03654; He et al. 2021, arXiv:2111.09543.

The convolution of DeBERTa-v2-xlarge, beside its first layer, is not supported.
"""

from dataclasses import replace

from models.attention.scoring.disentangled import TERMS
from models.checkpoints.families import bert
from models.checkpoints.families.family import ACTIVATION_NAMES, Family, HeadConfig, Names
from models.encoder.model import EncoderConfig
from models.folders.folder import CheckpointError, JsonSettings


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    width, n_positions = settings.need("hidden_size"), settings.need("max_position_embeddings")
    settings.allow("conv_kernel_size", 0)
    settings.allow("embedding_size", width)
    settings.allow("pooler_hidden_size", width)
    for key, value in {"relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm"}.items():
        if (found := settings.get(key, None)) != value:
            raise CheckpointError(f"{settings.file}: {key}={found!r:.80} is not supported (supported: {value!r}); use another checkpoint")
    types = JsonSettings({"type_vocab_size": 0, "layer_norm_eps": 1e-7} | settings.values, settings.file)
    furthest = settings.get("max_relative_positions", -1)
    furthest = furthest if furthest > 0 else n_positions
    buckets = settings.get("position_buckets", -1)
    return replace(
        bert.encoder_config(types),
        positions="learned" if settings.get("position_biased_input", True) else "none",
        attention="disentangled",
        attention_options={
            "n_positions": n_positions,
            "span": buckets if buckets > 0 else furthest,
            "max_distance": furthest if buckets > 0 else None,
            "terms": _terms(settings),
            "norm_eps": types.get("layer_norm_eps", 1e-7),
        },
        d_head=settings.get("attention_head_size", None),
    )


def _terms(settings: JsonSettings) -> tuple[str, ...]:
    """Return the names in `TERMS` that `pos_att_type` lists, such as "p2c|c2p"."""
    listed = settings.get("pos_att_type", [])
    names = [name.strip() for name in (listed.lower().split("|") if isinstance(listed, str) else listed)]
    if not names or set(names) - set(TERMS):
        raise CheckpointError(f"{settings.file}: pos_att_type={listed!r:.80} must list some of {', '.join(TERMS)}; use another checkpoint")
    return tuple(term for term in TERMS if term in names)


def _head(settings: JsonSettings) -> HeadConfig:
    return HeadConfig(activation=settings.pick("pooler_hidden_act", "gelu", {**ACTIVATION_NAMES, "tanh": "tanh"}))


ENCODER_NAMES: Names = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.token_type_embeddings": "embeddings.token_types",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.rel_embeddings": "blocks.0.attention.relative.table",
    "encoder.LayerNorm": "blocks.0.attention.relative.norm",
    "encoder.layer.{i}.attention.self.query_proj": "blocks.{i}.attention.to_q",
    "encoder.layer.{i}.attention.self.key_proj": "blocks.{i}.attention.to_k",
    "encoder.layer.{i}.attention.self.value_proj": "blocks.{i}.attention.to_v",
    "encoder.layer.{i}.attention.output.dense": "blocks.{i}.attention.to_out",
    "encoder.layer.{i}.attention.output.LayerNorm": "blocks.{i}.attention_norm",
    "encoder.layer.{i}.intermediate.dense": "blocks.{i}.feedforward.up",
    "encoder.layer.{i}.output.dense": "blocks.{i}.feedforward.down",
    "encoder.layer.{i}.output.LayerNorm": "blocks.{i}.feedforward_norm",
}

DEBERTA = Family(
    prefix="deberta.",
    encoder_config=encoder_config,
    encoder_names=(ENCODER_NAMES,),
    sequence_head=_head,
    sequence_names={"pooler.dense": "transform.linear", "classifier": "classifier"},
    unused=("pooler.", "cls.", "lm_predictions.", "mask_predictions.", "embeddings.position_embeddings."),
    reads_token_types=True,
)
