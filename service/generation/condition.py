"""A run between two steps, as a value: put into any engine of the same bundle, in any process, it goes on with the same tokens."""

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
from service.generation.session import State


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What cannot be had from the request and the tokens drawn so far. All else follows from those: penalties, random numbers (by seed and
    position), text that is held back, how far a grammar is."""

    request: GenerationRequest
    completion: tuple[int, ...]
    position: int  # tokens that the states have seen
    states: tuple[State, ...]  # without B
    logits: NDArray[np.float32] | None  # (V,) of the next token; None while the prompt is not done
    fingerprint: str  # of the bundle: states of another one may have the same shapes and another meaning
    prompt_logprobs: Sequence[TokenLogprob | None] = ()  # of the tokens that the states have seen, if requested
    before: NDArray[np.float32] | None = None  # (V,) logits of the prompt's next token, if its log-probabilities were requested

    def check(self, decoder: contract.Decoder, vocab_size: int, fingerprint: str) -> None:
        """InvalidRequest for what no run of this model can be."""
        if self.fingerprint != fingerprint:
            raise InvalidRequest(
                f"the state is of the bundle with fingerprint {self.fingerprint[:12]!r} and this model's is {fingerprint[:12]!r}: "
                "continue it with the bundle that made it, or send the request again"
            )
        shapes = [(state.shape, np.dtype(state.dtype)) for state in decoder.states]
        if [(state.shape, state.dtype) for state in self.states] != shapes:
            raise InvalidRequest("the state is not of this model: its tensors have other shapes")
        for state, of_model in zip(self.states, decoder.states, strict=True):
            if not np.isfinite(state).all():
                raise InvalidRequest(f"the state is broken: {of_model.name} has numbers that are not finite; send the request again")
            if of_model.name.endswith("_z") and self.position and not (state > 0).all():  # a sum of exponentials, which is a divisor
                raise InvalidRequest(f"the state is broken: {of_model.name} has numbers that are not above 0; send the request again")
        for name, logits in (("logits", self.logits), ("before", self.before)):
            if logits is None:
                continue
            if not (logits.shape == (vocab_size,) and logits.dtype == np.float32):
                raise InvalidRequest(f"the state is not of this model: {name} has not {vocab_size} numbers in float32")
            if not np.isfinite(logits.max()):  # a token that the model excludes has -inf
                raise InvalidRequest(f"the state is broken: {name} has numbers that are not finite; send the request again")
        prompt, drawn = len(self.request.prompt), len(self.completion)
        possible = range(prompt) if self.logits is None else [prompt + drawn]
        if self.position not in possible or (drawn and self.logits is None):
            raise InvalidRequest(f"position {self.position} is none of a run with {prompt} tokens of prompt and {drawn} drawn")
        if drawn and not 0 <= min(self.completion) <= max(self.completion) < vocab_size:
            raise InvalidRequest(f"the completion has tokens outside this model's vocabulary of {vocab_size}")
        told = 0 if self.request.prompt_logprobs is None else min(self.position, prompt)
        between = self.request.prompt_logprobs is not None and self.logits is None and self.position > 0
        if len(self.prompt_logprobs) != told or (self.before is not None) != between:
            raise InvalidRequest(f"the log-probabilities of {len(self.prompt_logprobs)} tokens are none of a prompt read up to {told}")

    def pack(self) -> bytes:
        """Safetensors: the tensors, and as one more of them the words, in JSON. A deadline is a moment of this process, and stays."""
        tensors = {f"state_{at}": state for at, state in enumerate(self.states)}
        for name, logits in (("logits", self.logits), ("before", self.before)):
            if logits is not None:
                tensors[name] = logits
        words = _Words(
            request=dataclasses.replace(self.request, deadline=math.inf),
            completion=self.completion,
            position=self.position,
            fingerprint=self.fingerprint,
            prompt_logprobs=tuple(self.prompt_logprobs),
        )
        tensors["words"] = np.frombuffer(words.model_dump_json().encode(), np.uint8)
        packed: bytes = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> "Condition":
        """Raises InvalidRequest for bytes that `pack` did not give; whether they are of this model, `check` says."""
        try:
            tensors = load(packed)
            words = _Words.model_validate_json(tensors.pop("words").tobytes())
            logits, before = tensors.pop("logits", None), tensors.pop("before", None)
            states = tuple(tensors[f"state_{at}"] for at in range(len(tensors)))
        except (SafetensorError, KeyError, ValidationError) as error:
            raise InvalidRequest(f"these bytes are not the condition of a run: {error}") from error
        return cls(
            request=words.request,
            completion=words.completion,
            position=words.position,
            states=states,
            logits=logits,
            fingerprint=words.fingerprint,
            prompt_logprobs=words.prompt_logprobs,
            before=before,
        )


class _Words(BaseModel):
    """What of a condition is not a tensor."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    request: GenerationRequest
    completion: tuple[int, ...]
    position: int
    fingerprint: str
    prompt_logprobs: tuple[TokenLogprob | None, ...]
