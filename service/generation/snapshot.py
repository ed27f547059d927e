"""A run between two steps as a value. Any engine of the same bundle, in any process, can resume the run, and then emits the same tokens.

A `State` is the result of feeding tokens to the decoder. A `Snapshot` is a state with the request and the tokens drawn for it. A request
may begin at the state of earlier tokens, so a state's position (tokens fed to it) may differ from the index into the request's prompt.
A snapshot's state may also be older than its last token: the engine that continues the run feeds it the missing tokens first.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from export import contract
from service.errors import InvalidRequest
from service.generation.request import GenerationRequest, TokenLogprob
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


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run between two steps. Penalties, random numbers (by seed and position), text that is held back, and the position in a grammar are
    not stored, because they can be derived from these fields.
    """

    request: GenerationRequest
    state: State
    completion: tuple[int, ...] = ()
    start: int = 0  # position of the state at which the request's prompt began
    prompt_logprobs: Sequence[TokenLogprob | None] = ()  # log-probabilities of the prompt tokens fed to the state, if requested
    before: NDArray[np.float32] | None = None  # (V,) logits for the next prompt token, if its log-probability was requested

    @property
    def fed(self) -> int:
        """Return the number of tokens of prompt and completion together that were fed to the state."""
        return self.state.position - self.start

    def check(self, decoder: contract.Decoder, vocab_size: int, fingerprint: str) -> None:
        """Raise InvalidRequest if this is not a valid snapshot of a run of the model."""
        self.state.check(decoder, vocab_size, fingerprint)
        if self.before is not None:
            check_logits("before", self.before, vocab_size)
        prompt, drawn = len(self.request.prompt), len(self.completion)
        if not (self.start >= 0 and 0 <= self.fed <= prompt + drawn):
            raise InvalidRequest(
                f"position {self.state.position} is none of a run that began at {self.start}, with {prompt} prompt tokens and {drawn} drawn"
            )
        if self.fed == prompt + drawn and self.state.logits is None:
            raise InvalidRequest("all tokens are fed and the state has no logits of the next token")
        if drawn and not 0 <= min(self.completion) <= max(self.completion) < vocab_size:
            raise InvalidRequest(f"the completion has tokens outside this model's vocabulary of {vocab_size}")
        wanted = self.request.prompt_logprobs is not None
        if wanted and drawn and self.fed < prompt:
            raise InvalidRequest("the log-probabilities of a prompt cannot be continued after its completion has begun")
        told = min(self.fed, prompt) if wanted else 0
        if len(self.prompt_logprobs) != told or (self.before is not None) != (wanted and 0 < self.fed < prompt):
            raise InvalidRequest(
                f"the log-probabilities of {len(self.prompt_logprobs)} tokens are none of a prompt read up to {min(self.fed, prompt)}"
            )

    def pack(self) -> bytes:
        """Return the snapshot as safetensors bytes: its tensors, and one more tensor that contains the other fields as JSON. The deadline
        is left out, because it is a time of this process's clock.
        """
        state = self.state
        tensors = {f"state_{at}": tensor for at, tensor in enumerate(state.tensors)}
        optional = {"logits": state.logits, "before": self.before}
        tensors |= {name: logits for name, logits in optional.items() if logits is not None}
        fields = _Fields(
            request=dataclasses.replace(self.request, deadline=math.inf),
            completion=self.completion,
            start=self.start,
            position=state.position,
            fingerprint=state.fingerprint,
            prompt_logprobs=tuple(self.prompt_logprobs),
        )
        tensors["fields"] = np.frombuffer(fields.model_dump_json().encode(), np.uint8)
        packed: bytes = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> "Snapshot":
        """Return the snapshot in bytes made by `pack`. Raises InvalidRequest for any other bytes. Call `check` to test whether the snapshot
        fits the model.
        """
        try:
            tensors = load(packed)
            fields = _Fields.model_validate_json(tensors.pop("fields").tobytes())
            logits, before = tensors.pop("logits", None), tensors.pop("before", None)
            states = tuple(tensors[f"state_{at}"] for at in range(len(tensors)))
        except (SafetensorError, KeyError, ValidationError) as error:
            raise InvalidRequest(f"these bytes are not the snapshot of a run: {error}") from error
        return cls(
            request=fields.request,
            state=State(tensors=states, position=fields.position, logits=logits, fingerprint=fields.fingerprint),
            completion=fields.completion,
            start=fields.start,
            prompt_logprobs=fields.prompt_logprobs,
            before=before,
        )


class _Fields(BaseModel):
    """The fields of a snapshot that are not tensors."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    request: GenerationRequest
    completion: tuple[int, ...]
    start: int
    position: int
    fingerprint: str
    prompt_logprobs: tuple[TokenLogprob | None, ...]
