"""The request to a generation engine, and the pieces of its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.runtime.lanes import Origin
from service.states.record import Keep, StateReference

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The parameters for drawing a token. The defaults draw from the model's own distribution.

    The random number depends only on `seed` and the token's position, so a seed gives the same tokens in any replica and batch.
    """

    seed: int
    temperature: float = 1.0  # 0 means that the likeliest token is always drawn
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # for tokens in prompt and completion (Keskar et al. 2019)
    frequency_penalty: float = 0.0  # for tokens in the completion only
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # (): all


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A language that the completion must belong to."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    param: str = field(default="grammar", compare=False)  # name of the grammar's field in the client's body, for error messages


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(Origin):
    """A request to continue one sequence. `GeneratorEngine.submit` checks it against the model's vocabulary and limits."""

    prompt: tuple[int, ...]  # at least one token; or none, if tokens are drawn from a state that has logits
    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0  # a completion of fewer tokens is not ended by an end of text, stop token or stop string
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # whether the text contains the stop string at its end
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    top_logprobs: int | None = None  # number of alternatives with log-probabilities; 0: only the drawn token; None: none at all
    prompt_logprobs: int | None = None  # as `top_logprobs`, for each prompt token except the first
    grammar: Grammar | None = None
    cache_salt: str = ""  # in the prefix cache, the request finds only states of requests with the same salt
    start: StateReference | None = None  # the state that the prompt continues; None: the empty state
    keep: Keep | None = None  # how to keep the state after the last token; None: it is not kept
    known: tuple[int, ...] = ()  # tokens that this run has drawn in another engine; they are fed again, but not emitted again
    checkpoint: str = ""  # id of the checkpoint that the engine writes and, if `reopened`, continues from; "": no checkpoint
    reopened: bool = False  # whether the run was lost in another engine, which may have written its checkpoint
    numerics: str = ""  # arithmetic of the engine that drew `known`, because another arithmetic could draw other tokens; "": any

    @property
    def slots(self) -> int:
        """Return the number of the engine's slots that the request needs."""
        return 1

    @property
    def takes_known(self) -> bool:
        """Return whether the engine can continue a lost run after its `known` tokens. If not, the run begins again."""
        return True

    @property
    def outputs(self) -> int:
        """Return the number of runs that answer the request."""
        return 1


class TokenLogprob(NamedTuple):
    """A token, its natural log-probability under the model (before temperature and filters), and the likeliest tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None  # 1: no token is likelier; set only for prompt tokens


class Delta(NamedTuple):
    """The output of a run since the previous delta. Text is held back while it may be the beginning of a stop string, or is an incomplete
    character.

    The last delta has a `finish_reason`. `stop_reason` is the stop string or token id that ended the run, or None if the run ended at an
    end-of-text token.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def last(self) -> "Delta":
        """Return a last delta without text and tokens, for a run whose last token was sent before its end."""
        return Delta("", finish_reason=self.finish_reason, stop_reason=self.stop_reason)


class Token(NamedTuple):
    """One token of a run. The engine does not need its text; the reader of the run converts it to text."""

    token_id: int
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None

    def last(self) -> Delta:
        """Return a last delta without text and tokens, as `Delta.last` does."""
        return Delta("", finish_reason=self.finish_reason)


class Attention(NamedTuple):
    """The attention weights of an encoder-decoder's output, (T, N): for each of T output tokens, over the N tokens of the source."""

    token_ids: tuple[int, ...]
    weights: NDArray[np.float32]
