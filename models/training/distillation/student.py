"""Builds the student: the teacher with another attention in every block, and with more positions.

Position t beyond the teacher's N_max positions gets the teacher's position embedding t mod N_max, as if the text were cut into
pieces of N_max tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.layers.softmax import SoftmaxAttention
from models.checkpoints.published import Checkpoint
from models.encoder.model import Encoder, EncoderConfig
from models.encoder.softmax import POSITIONS
from models.folders.folder import CheckpointError


def repeated_positions(table: Tensor, n_positions: int) -> Tensor:
    """Repeat the rows of a position table: (N_max, D) -> (n_positions, D)."""
    return table[torch.arange(n_positions) % table.shape[0]]


def with_attention(teacher: Checkpoint, attention: str, options: Mapping[str, Any], n_positions: int) -> Encoder:
    """Return an encoder with the teacher's weights, another attention and more positions. Parameters that the teacher does not have keep
    their initial values.

    With attention="softmax" the result is the teacher for longer texts. Raises CheckpointError if the teacher is not an encoder with
    softmax attention and learned positions that count from 0, or if the layer's projections differ from those of softmax attention.
    """
    config = teacher.config
    if (
        teacher.kind != "encoder"
        or not isinstance(config, EncoderConfig)
        or config.attention != "softmax"
        or config.positions != "learned"
        or config.position_padding_id is not None
    ):
        raise CheckpointError(
            f"{teacher.folder}: the teacher must be an encoder with softmax attention and learned positions, such as BERT"
        )
    student = Encoder(replace(config, attention=attention, attention_options=dict(options), n_positions=n_positions))
    weights = dict(teacher.model.encoder.state_dict())
    weights[POSITIONS] = repeated_positions(weights[POSITIONS], n_positions)
    try:
        absent = student.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"attention={attention!r} has projections of other shapes than softmax attention: {error}") from error
    if absent.unexpected_keys:
        raise CheckpointError(
            f"attention={attention!r} lacks the teacher's parameter {absent.unexpected_keys[0]}; choose another attention"
        )
    return student.eval()


class FusedSoftmaxAttention(nn.Module):
    """`SoftmaxAttention` computed by PyTorch's fused operator, which does not store a (B, H, N, N) matrix. It serves a teacher, which is
    not trained.
    """

    def __init__(self, layer: SoftmaxAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, key_mask: Tensor, **pairs: None) -> Tensor:
        """Return the attention's output. x (B, N, D), key_mask bool (B, N) -> (B, N, D)."""
        layer = self.layer
        q, k, v = (split_heads(to(x), layer.n_heads) for to in (layer.to_q, layer.to_k, layer.to_v))
        mask = None if bool(key_mask.all()) else key_mask[:, None, None, :]
        return layer.to_out(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)))


def reading(encoder: Encoder) -> Encoder:
    """Prepare the encoder as a teacher, in place, and return it: its attention uses the fused operator, and all parameters are frozen."""
    encoder.requires_grad_(False)
    for block in encoder.blocks:
        assert isinstance(block.attention, SoftmaxAttention)
        block.attention = FusedSoftmaxAttention(block.attention)
    return encoder


def new_parameters(student: Encoder, teacher: Encoder) -> list[str]:
    """Return the names of the student's parameters that the teacher does not have, such as those of feature maps."""
    known = {name.replace("attention.layer.", "attention.") for name, _ in teacher.named_parameters()}
    return [name for name, _ in student.named_parameters() if name not in known]
