"""Longformer: a RoBERTa with attention in windows. Beltagy et al. 2020, arXiv:2004.05150.

In a text classifier the first token has global attention. In the other models no token has global attention. `transformers` does
the same.
"""

from dataclasses import replace

from models.checkpoints.families import bert, roberta
from models.checkpoints.families.family import Family
from models.encoder.model import EncoderConfig
from models.folders.folder import CheckpointError, JsonSettings


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    window = settings.get("attention_window", 512)
    windows = {window} if isinstance(window, int) else set(window)
    if len(windows) != 1:
        raise CheckpointError(
            f"{settings.file}: attention_window={window} differs from layer to layer, which is not supported; use another checkpoint"
        )
    scores_texts = settings.need("architectures")[0].endswith("ForSequenceClassification")
    return replace(
        roberta.encoder_config(settings), attention="longformer", attention_options={"window": windows.pop(), "n_global": int(scores_texts)}
    )


PROJECTIONS_OF_GLOBALS = {
    f"encoder.layer.{{i}}.attention.self.{theirs}_global": f"blocks.{{i}}.attention.{ours}_global"
    for theirs, ours in (("query", "to_q"), ("key", "to_k"), ("value", "to_v"))
}

LONGFORMER = Family(
    prefix="longformer.",
    encoder_config=encoder_config,
    encoder_names=({**bert.ENCODER_NAMES, **PROJECTIONS_OF_GLOBALS},),
    unused=("pooler.", "lm_head."),
    pad_token_id=roberta.PAD_TOKEN_ID,
)
