"""Nyströmformer: a BERT whose attention goes through landmarks. Xiong et al. 2021, arXiv:2102.03902.

Computed is the paper's attention, per matrix and for tokens only. `transformers` differs from it: it begins the inverse by the largest norm
in the whole batch, keeps padding out of one of the three softmaxes alone, cuts segments for one length (`segment_means_seq_len`) only, and
takes softmax attention at every length where that setting equals num_landmarks. Here that is so up to num_landmarks tokens.
"""

from dataclasses import replace

from models.checkpoints.families import bert
from models.checkpoints.families.family import ACTIVATION_NAMES, Family, HeadConfig
from models.encoder.model import EncoderConfig
from models.folders.folder import Settings

UNUSED_POSITIONS = 2  # rows in front of the first position


def encoder_config(settings: Settings) -> EncoderConfig:
    return replace(
        bert.encoder_config(settings),
        attention="nystromformer",
        attention_options={
            "n_landmarks": settings.get("num_landmarks", 64),
            "conv_kernel": settings.get("conv_kernel_size", 65),
        },
        activation=activation(settings),
        norm_eps=settings.get("layer_norm_eps", 1e-5),
    )


def activation(settings: Settings) -> str:
    """Of the feed-forward layers, and of a classifier's head too."""
    return settings.pick("hidden_act", "gelu_new", ACTIVATION_NAMES)


NYSTROMFORMER = Family(
    prefix="nystromformer.",
    encoder_config=encoder_config,
    encoder_names=({**bert.ENCODER_NAMES, "encoder.layer.{i}.attention.self.conv": "blocks.{i}.attention.conv"},),
    sequence_head=lambda settings: HeadConfig(pooling="cls", activation=activation(settings)),
    sequence_names={"classifier.dense": "transform.linear", "classifier.out_proj": "classifier"},
    token_names={"classifier": "classifier"},
    unused=("cls.",),
    unread_rows={"embeddings.position_embeddings.weight": UNUSED_POSITIONS},
    pad_token_id=1,
    reads_token_types=True,
)
