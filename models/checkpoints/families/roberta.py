"""RoBERTa and XLM-RoBERTa: a BERT in which the first token has the position padding id + 1. Liu et al. 2019, arXiv:1907.11692."""

from dataclasses import replace

from models.checkpoints.families import bert
from models.checkpoints.families.family import Family, MaskedHead
from models.encoder.model import EncoderConfig
from models.folders.folder import JsonSettings

PAD_TOKEN_ID = 1


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    padding_id = settings.get("pad_token_id", PAD_TOKEN_ID)
    return replace(
        bert.encoder_config(settings),
        position_padding_id=padding_id,
        n_positions=settings.need("max_position_embeddings") - padding_id - 1,  # e.g. a table of 514 rows has 512 positions
    )


ROBERTA = Family(
    prefix="roberta.",
    encoder_config=encoder_config,
    encoder_names=(bert.ENCODER_NAMES,),
    unused=("pooler.", "lm_head."),
    masked_head=MaskedHead(
        transform="lm_head.dense", norm="lm_head.layer_norm", decoder="lm_head.decoder", bias="lm_head.bias", activation=lambda _: "gelu"
    ),
    pad_token_id=PAD_TOKEN_ID,
)
