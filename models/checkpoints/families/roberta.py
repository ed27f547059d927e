"""RoBERTa and XLM-RoBERTa: a BERT that counts positions after the padding id. Liu et al. 2019, arXiv:1907.11692."""

from dataclasses import replace

from models.checkpoints.families import bert
from models.checkpoints.families.family import Family, HeadConfig
from models.encoder.model import EncoderConfig
from models.folders.folder import Settings

PAD_TOKEN_ID = 1


def encoder_config(settings: Settings) -> EncoderConfig:
    padding_id = settings.get("pad_token_id", PAD_TOKEN_ID)
    return replace(
        bert.encoder_config(settings),
        position_padding_id=padding_id,
        n_positions=settings.need("max_position_embeddings") - padding_id - 1,  # 514 rows hold 512 tokens
    )


ROBERTA = Family(
    prefix="roberta.",
    encoder_config=encoder_config,
    encoder_names=(bert.ENCODER_NAMES,),
    sequence_head=lambda settings: HeadConfig(pooling="cls", activation="tanh"),
    sequence_names={"classifier.dense": "transform.linear", "classifier.out_proj": "classifier"},
    token_names={"classifier": "classifier"},
    unused=("pooler.", "lm_head."),
    pad_token_id=PAD_TOKEN_ID,
)
