"""A run between two steps, as a value: put into any engine of the same bundle, in any process, it goes on with the same tokens."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from export import contract
from service.errors import InvalidRequest
from service.generation.request import GenerationRequest
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

    def check(self, decoder: contract.Decoder, vocab_size: int) -> None:
        """InvalidRequest for what no run of this model can be."""
        shapes = [(state.shape, np.dtype(state.dtype)) for state in decoder.states]
        if [(state.shape, state.dtype) for state in self.states] != shapes:
            raise InvalidRequest("the state is not of this model: its tensors have other shapes")
        if self.logits is not None and not (self.logits.shape == (vocab_size,) and self.logits.dtype == np.float32):
            raise InvalidRequest(f"the state is not of this model: its logits are not {vocab_size} numbers in float32")
        prompt, drawn = len(self.request.prompt), len(self.completion)
        possible = range(prompt) if self.logits is None else [prompt + drawn]
        if self.position not in possible or (drawn and self.logits is None):
            raise InvalidRequest(f"position {self.position} is none of a run with {prompt} tokens of prompt and {drawn} drawn")
        if drawn and not 0 <= min(self.completion) <= max(self.completion) < vocab_size:
            raise InvalidRequest(f"the completion has tokens outside this model's vocabulary of {vocab_size}")

    def pack(self) -> bytes:
        """Safetensors: the tensors, and as one more of them the words, in JSON. A deadline is a moment of this process, and stays."""
        tensors = {f"state_{at}": state for at, state in enumerate(self.states)}
        if self.logits is not None:
            tensors["logits"] = self.logits
        request = dataclasses.replace(self.request, deadline=math.inf)
        words = _Words(request=request, completion=self.completion, position=self.position)
        tensors["words"] = np.frombuffer(words.model_dump_json().encode(), np.uint8)
        packed: bytes = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> "Condition":
        """Raises InvalidRequest for bytes that `pack` did not give; whether they are of this model, `check` says."""
        try:
            tensors = load(packed)
            words = _Words.model_validate_json(tensors.pop("words").tobytes())
            logits = tensors.pop("logits", None)
            states = tuple(tensors[f"state_{at}"] for at in range(len(tensors)))
        except (SafetensorError, KeyError, ValidationError) as error:
            raise InvalidRequest(f"these bytes are not the condition of a run: {error}") from error
        return cls(request=words.request, completion=words.completion, position=words.position, states=states, logits=logits)


class _Words(BaseModel):
    """What of a condition is not a tensor."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    request: GenerationRequest
    completion: tuple[int, ...]
    position: int
