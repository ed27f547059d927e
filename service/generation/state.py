"""The state of a decoder as a value. Any engine of the same bundle, in any process, can continue from it, and then emits the same tokens.

A request may begin at the state of earlier tokens, so a state's position (tokens fed to it) may differ from the index into the request's
prompt.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.errors import InvalidRequest
from service.generation.session import Tensor
from service.states.validity import check_bundle, check_form, check_logits, check_numbers, check_position


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a decoder after the tokens of one sequence. The arrays may be shared and are never changed."""

    tensors: tuple[Tensor, ...]  # each without the batch axis, in the order of the decoder's states
    position: int  # number of tokens that were fed to the state
    logits: NDArray[np.float32] | None  # (V,) logits of the next token; None if they were not computed
    fingerprint: str  # the bundle's fingerprint; needed because another bundle's states may have the same shapes
    seen: NDArray[np.uint8] | None = None  # bit i (little-endian) is 1 if token i was fed; None if the state was not stored
    recent: tuple[int, ...] = ()  # the last tokens fed, `MOST_RECENT` at most; () if the state was not stored

    @property
    def size_bytes(self) -> int:
        """Return the memory of the tensors and logits in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors) + (0 if self.logits is None else self.logits.nbytes)

    @property
    def finite(self) -> bool:
        """Return whether all numbers are finite. A logit may be -inf, which excludes a token."""
        return all(np.isfinite(tensor).all() for tensor in self.tensors) and (self.logits is None or bool(np.isfinite(self.logits.max())))

    def check(self, decoder: contract.Decoder, vocab_size: int, fingerprint: str) -> None:
        """Raise InvalidRequest if this is not a valid state of the model."""
        check_bundle(self.fingerprint, fingerprint)
        check_position(self.position, decoder)
        if len(self.tensors) != len(decoder.states):
            raise InvalidRequest(f"the state is not of this model: it has {len(self.tensors)} tensors, not {len(decoder.states)}")
        for tensor, spec in zip(self.tensors, decoder.states, strict=True):
            check_form(spec, tensor.shape, tensor.dtype, self.position)
            check_numbers(spec, tensor, self.position)
        if self.logits is not None:
            check_logits("logits", self.logits, vocab_size)
