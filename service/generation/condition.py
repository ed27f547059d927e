"""A run between two steps, as a value: put into any engine of the same bundle, in any process, it goes on with the same tokens."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from service.errors import InvalidRequest
from service.generation.request import GenerationRequest
from service.generation.sampling import SamplerState
from service.generation.session import State
from service.generation.text import TextState


@dataclass(frozen=True, kw_only=True)
class Condition:
    """`states` have no B. `logits` (V,) are those of the next token, None while the prompt is not done. The sampler and the text that is
    held back are here as well, so nothing is lost that was not yet said."""

    request: GenerationRequest
    position: int  # tokens that the states have seen
    completion: tuple[int, ...]
    states: tuple[State, ...]
    logits: NDArray[np.float32] | None
    sampler: SamplerState | None
    text: TextState

    def pack(self) -> bytes:
        """Safetensors: the tensors, and as one more of them the words, in JSON. A deadline is a moment of this process, and stays."""
        tensors = {f"state_{at}": state for at, state in enumerate(self.states)}
        if self.logits is not None:
            tensors["logits"] = self.logits
        if self.sampler is not None:
            tensors |= {"token_ids": self.sampler.token_ids, "counts": self.sampler.counts}
        words = _Words(
            request=dataclasses.replace(self.request, deadline=math.inf),
            position=self.position,
            completion=self.completion,
            draws=None if self.sampler is None else self.sampler.position,
            text=self.text,
        )
        tensors["words"] = np.frombuffer(words.model_dump_json().encode(), np.uint8)
        packed: bytes = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> "Condition":
        """Raises InvalidRequest for bytes that `pack` did not give; whether they are of this model is the engine's to say."""
        try:
            tensors = load(packed)
            words = _Words.model_validate_json(tensors.pop("words").tobytes())
            n_states = sum(name.startswith("state_") for name in tensors)
            sampler = None
            if words.draws is not None:
                sampler = SamplerState(
                    sampling=words.request.sampling,
                    top_logprobs=words.request.top_logprobs,
                    position=words.draws,
                    token_ids=tensors["token_ids"],
                    counts=tensors["counts"],
                )
            return cls(
                request=words.request,
                position=words.position,
                completion=words.completion,
                states=tuple(tensors[f"state_{at}"] for at in range(n_states)),
                logits=tensors.get("logits"),
                sampler=sampler,
                text=words.text,
            )
        except (SafetensorError, KeyError, ValidationError) as error:
            raise InvalidRequest(f"these bytes are not the condition of a run: {error}") from error


class _Words(BaseModel):
    """What of a condition is not a tensor."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", ser_json_bytes="base64", val_json_bytes="base64")

    request: GenerationRequest
    position: int
    completion: tuple[int, ...]
    draws: int | None  # the sampler's position
    text: TextState
