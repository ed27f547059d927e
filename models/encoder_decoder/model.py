"""The interface of all encoder-decoders: read a source once, then write one token a step.

The source becomes a *memory*, tensors with a row for each of its tokens, (B, N, ..) each; the *state* changes from step to step,
tensors (B, ..) whose size does not depend on how much was read or written. So rows that are at different steps can be advanced together.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

Tensors = dict[str, Tensor]


class EncoderDecoder(nn.Module, ABC):
    """Base of all encoder-decoders. A mask is (B, N) bool, True = token; values at padding have no effect."""

    config: Any

    @abstractmethod
    def read(self, source: Tensor, mask: Tensor) -> tuple[Tensors, Tensors]:
        """(B, N) int64, (B, N) bool -> the memory, and the state before the first output."""

    @abstractmethod
    def step(self, previous: Tensor, state: Tensors, memory: Tensors, mask: Tensor) -> tuple[Tensor, Tensors, Tensor]:
        """The output before, (B,) int64 -> the logits of the next one (B, V), the new state, and the attention weights (B, N), sum 1."""

    @abstractmethod
    def forward(self, source: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        """With all outputs known, for training: (B, N), (B, N), (B, T) -> (B, T, V), the logits that follow each of `previous`."""
