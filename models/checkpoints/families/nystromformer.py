"""Nyströmformer: a BERT that approximates softmax attention with landmarks. Xiong et al. 2021, arXiv:2102.03902.

The attention follows the paper: each attention matrix is approximated separately, and padding has no influence. `transformers`
differs. It initialises the iteration for the inverse with the largest norm in the whole batch, masks padding in only one of the
three softmaxes, computes the segments for one length only (`segment_means_seq_len`), and uses softmax attention at every length if
that setting equals num_landmarks. Here, texts of at most num_landmarks tokens get softmax attention.
"""

from dataclasses import replace

from models.checkpoints.families import bert
from models.checkpoints.families.family import ACTIVATION_NAMES, Family, HeadConfig
from models.encoder.model import EncoderConfig
from models.folders.folder import JsonSettings

UNUSED_POSITIONS = 2  # number of rows in the position table before the row of the first position; the model does not use them


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    return replace(
        bert.encoder_config(settings),
        attention="nystromformer",
        attention_options={"n_landmarks": settings.get("num_landmarks", 64), "conv_kernel": settings.get("conv_kernel_size", 65)},
        activation=activation(settings),
        norm_eps=settings.get("layer_norm_eps", 1e-5),
    )


def activation(settings: JsonSettings) -> str:
    """Return the name of the activation that the feed-forward layers and the classifier's head use."""
    return settings.pick("hidden_act", "gelu_new", ACTIVATION_NAMES)


NYSTROMFORMER = Family(
    prefix="nystromformer.",
    encoder_config=encoder_config,
    encoder_names=({**bert.ENCODER_NAMES, "encoder.layer.{i}.attention.self.conv": "blocks.{i}.attention.conv"},),
    sequence_head=lambda settings: HeadConfig(activation=activation(settings)),
    unused=("cls.",),
    unread_rows={"embeddings.position_embeddings.weight": UNUSED_POSITIONS},
    pad_token_id=1,
    reads_token_types=True,
)
