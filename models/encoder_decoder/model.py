"""The interface of all encoder-decoders: `read` encodes a source once, then each `step` generates one token.

The encoded source is the *memory*, tensors (B, N, ..) with a row for each source token. The *state* changes with every step. Its
tensors (B, ..) have a constant size, so that sequences at different steps can be computed in one batch.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

Tensors = dict[str, Tensor]


class EncoderDecoder(nn.Module, ABC):
    """Base class of all encoder-decoders. A mask is (B, N) bool, True = token. Values at padding have no effect."""

    config: Any

    @abstractmethod
    def read(self, source: Tensor, mask: Tensor) -> tuple[Tensors, Tensors]:
        """Encode the source (B, N) int64 with its mask (B, N) bool. Return the memory, and the state before the first output token."""

    @abstractmethod
    def step(self, previous: Tensor, state: Tensors, memory: Tensors, mask: Tensor) -> tuple[Tensor, Tensors, Tensor]:
        """Map the previous token (B,) int64 to the next token's logits (B, V), the new state, and the attention weights (B, N), whose sum
        is 1."""

    @abstractmethod
    def forward(self, source: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        """Compute in one call the logits (B, T, V) of the token after each token of `previous` (B, T) int64. This is for training, where
        the outputs are known.

        The source (B, N) and its mask (B, N) are those of `read`.
        """
