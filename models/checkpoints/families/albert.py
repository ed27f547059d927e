"""ALBERT: a BERT whose layers share their weights, with narrow embeddings. Lan et al. 2019, arXiv:1909.11942."""

from dataclasses import replace

from models.checkpoints.families import bert
from models.checkpoints.families.family import Family, Names
from models.encoder.model import EncoderConfig
from models.folders.folder import JsonSettings


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    settings.allow("num_hidden_groups", 1)
    settings.allow("inner_group_num", 1)
    activation = JsonSettings({"hidden_act": "gelu_new"} | settings.values, settings.file)
    return replace(bert.encoder_config(activation), d_embedding=settings.get("embedding_size", 128), shared_layers=True)


LAYER = "encoder.albert_layer_groups.0.albert_layers.0"

ENCODER_NAMES: Names = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.token_type_embeddings": "embeddings.token_types",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.embedding_hidden_mapping_in": "embeddings.project",
    f"{LAYER}.attention.query": "blocks.0.attention.to_q",
    f"{LAYER}.attention.key": "blocks.0.attention.to_k",
    f"{LAYER}.attention.value": "blocks.0.attention.to_v",
    f"{LAYER}.attention.dense": "blocks.0.attention.to_out",
    f"{LAYER}.attention.LayerNorm": "blocks.0.attention_norm",
    f"{LAYER}.ffn": "blocks.0.feedforward.up",
    f"{LAYER}.ffn_output": "blocks.0.feedforward.down",
    f"{LAYER}.full_layer_layer_norm": "blocks.0.feedforward_norm",
}

ALBERT = Family(
    prefix="albert.",
    encoder_config=encoder_config,
    encoder_names=(ENCODER_NAMES,),
    sequence_names={"albert.pooler": "transform.linear", "classifier": "classifier"},
    unused=("pooler.", "predictions.", "sop_classifier."),
    reads_token_types=True,
)
