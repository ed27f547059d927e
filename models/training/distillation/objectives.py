"""The losses of the student in the two phases of a distillation. y is the output of one attention layer and x that of the last block, both
with a vector per token. e is the embedding of a text; in e eᵀ it is a matrix with a row for each text of the batch.

transfer     each attention layer gets the input of the teacher's layer, and its output is compared with that layer's output
             loss = mean over layers of sum |y - y_teacher|² / sum |y_teacher|²
end to end   the student reads the text by itself. Its embeddings, their similarities within a batch and the token vectors of its last
             block are compared with the teacher's; a and b are `similarities` and `hidden` of the config
             loss = mean (1 - cos(e, e_teacher)) + a mean (e eᵀ - e_teacher e_teacherᵀ)² + b sum |x - x_teacher|² / sum |x_teacher|²
The transfer phase follows Zhang et al. 2024 (LoLCATs), arXiv:2410.10254, and the similarity term Tung & Mori 2019, arXiv:1907.09682.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.encoder.model import Encoder
from models.encoder.pooling import POOLINGS, unit_length
from models.training.distillation.batches import Batch
from models.training.distillation.config import DistillationConfig


class Embedder(NamedTuple):
    """An encoder and the name of its pooling, a key of POOLINGS."""

    encoder: Encoder
    pooling: str

    def vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the embeddings (B, D), of norm 1, and the last layer's token vectors (B, N, D)."""
        ids, mask = batch
        x = self.encoder(ids, mask)
        return unit_length(POOLINGS[self.pooling](x, mask != 0)), x


def transfer_loss(teacher: Embedder, student: Embedder, batch: Batch) -> Tensor:
    return layer_losses(student, teachers_layers(teacher, batch), batch[1]).mean()


@torch.no_grad()
def teachers_layers(teacher: Embedder, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Return the input and the output, each (B, N, D), of every attention layer of the teacher."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((inputs[0], output))

    hooks = [block.attention.register_forward_hook(note) for block in teacher.encoder.blocks]
    try:
        teacher.encoder(*batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def layer_losses(student: Embedder, seen: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """Return the transfer loss of each layer, one number per layer. `seen` has the input and the output of each of the teacher's layers."""
    answers = (block.attention(x, mask != 0) for block, (x, _) in zip(student.encoder.blocks, seen, strict=True))
    return torch.stack([_distance(answer, y, mask) for answer, (_, y) in zip(answers, seen, strict=True)])


def end_to_end_loss(teacher: Embedder, student: Embedder, batch: Batch, config: DistillationConfig) -> Tensor:
    with torch.no_grad():
        wanted, wanted_tokens = teacher.vectors(batch)
    e, x = student.vectors(batch)
    cosine = (1 - (e * wanted).sum(-1)).mean()
    similarity = (e @ e.mT - wanted @ wanted.mT).square().mean()
    return cosine + config.similarities * similarity + config.hidden * _distance(x, wanted_tokens, batch[1])


def _distance(y: Tensor, wanted: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of |y - wanted|² divided by the sum of |wanted|², both over unmasked tokens: y, wanted (B, N, D), mask (B, N) ->
    ()."""
    present = mask.unsqueeze(-1)
    return ((y - wanted) * present).square().sum() / (wanted * present).square().sum()
