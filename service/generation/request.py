"""What a caller asks of the engine and what comes back, piece by piece."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.runtime.lanes import Lane

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn. The defaults draw from the model's own distribution.

    `seed` and the token's position decide the draw, in any replica and any batch: same seed, same tokens.
    """

    seed: int
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and completion (Keskar et al. 2019)
    frequency_penalty: float = 0.0  # over the completion
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # (): all


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A language that the completion must belong to."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    param: str = field(default="grammar", compare=False)  # what it is called in the caller's body, for errors that are about it


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One sequence to continue. Checked against the model's vocabulary and limits by `GeneratorEngine.submit`."""

    prompt: tuple[int, ...]  # at least one token
    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0  # no end of text and no stop token before so many, and no stop string in their text
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # leave the stop string in the text
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    top_logprobs: int | None = None  # None: no log-probabilities; 0: of the drawn token alone
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    grammar: Grammar | None = None
    lane: Lane = Lane.INTERACTIVE
    deadline: float = math.inf  # time.monotonic()
    traceparent: str | None = None  # W3C, of the request that asks for this; None: not traced
    client: str = ""  # owner of the share of slots; equal prompts are read once within a client, never across clients

    @property
    def slots(self) -> int:
        """Slots of the engine that it takes."""
        return 1

    @property
    def outputs(self) -> int:
        """Runs that answer it."""
        return 1


class TokenLogprob(NamedTuple):
    """A token, its natural log-probability under the model (before temperature and filters), and the likeliest others, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None  # 1: no token is likelier; known for tokens of a prompt


class Delta(NamedTuple):
    """What is new since the last one. Text may lag behind tokens: it waits while it might become a stop string or half a character.

    The last delta has a `finish_reason`; `stop_reason` is the stop string or token id that ended it, None for end of text.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Token(NamedTuple):
    """One token of a run whose text the engine does not need: the reader of the run turns it into text."""

    token_id: int
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


class Attention(NamedTuple):
    """What each token of an encoder-decoder's output was written from: T tokens, (T, N), N the length of the source."""

    token_ids: tuple[int, ...]
    weights: NDArray[np.float32]
