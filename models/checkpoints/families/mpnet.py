"""MPNet: a BERT with RoBERTa's positions and T5's relative position bias. Song et al. 2020, arXiv:2004.09297."""

from dataclasses import replace

from models.checkpoints.families import bert
from models.checkpoints.families.family import Family, Names
from models.encoder.model import EncoderConfig
from models.folders.folder import JsonSettings

PADDING_ID = 1  # the first position has the number PADDING_ID + 1 in the authors' code, whatever pad_token_id is in config.json
N_BUCKETS = 32  # number of relative position buckets, which is fixed in the authors' code, whatever the size of the bias table


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    settings.allow("relative_attention_num_buckets", N_BUCKETS)
    return replace(
        bert.encoder_config(settings),
        n_positions=settings.need("max_position_embeddings") - PADDING_ID - 1,
        position_padding_id=PADDING_ID,
        n_relative_buckets=N_BUCKETS,
        n_token_types=0,
    )


ENCODER_NAMES: Names = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.relative_attention_bias": "relative_bias",
    "encoder.layer.{i}.attention.attn.q": "blocks.{i}.attention.to_q",
    "encoder.layer.{i}.attention.attn.k": "blocks.{i}.attention.to_k",
    "encoder.layer.{i}.attention.attn.v": "blocks.{i}.attention.to_v",
    "encoder.layer.{i}.attention.attn.o": "blocks.{i}.attention.to_out",
    "encoder.layer.{i}.attention.LayerNorm": "blocks.{i}.attention_norm",
    "encoder.layer.{i}.intermediate.dense": "blocks.{i}.feedforward.up",
    "encoder.layer.{i}.output.dense": "blocks.{i}.feedforward.down",
    "encoder.layer.{i}.output.LayerNorm": "blocks.{i}.feedforward_norm",
}

MPNET = Family(
    prefix="mpnet.", encoder_config=encoder_config, encoder_names=(ENCODER_NAMES,), unused=("pooler.", "lm_head."), pad_token_id=PADDING_ID
)
