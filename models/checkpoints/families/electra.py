"""ELECTRA: a BERT that was trained to find replaced tokens, with embeddings that may be narrower. Clark et al. 2020, arXiv:2003.10555."""

from dataclasses import replace

from models.checkpoints.families import bert
from models.checkpoints.families.family import Family, HeadConfig, Names
from models.encoder.model import EncoderConfig
from models.folders.folder import JsonSettings


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    width = settings.get("embedding_size", 128)
    return replace(bert.encoder_config(settings), d_embedding=None if width == settings.need("hidden_size") else width)


ENCODER_NAMES: Names = {**bert.ENCODER_NAMES, "embeddings_project": "embeddings.project"}

ELECTRA = Family(
    prefix="electra.",
    encoder_config=encoder_config,
    encoder_names=(ENCODER_NAMES,),
    sequence_head=lambda settings: HeadConfig(activation="gelu"),
    unused=("discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
    reads_token_types=True,
)
