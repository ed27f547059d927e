"""The messages of a text stream from a replica to a gateway.

("deltas", [RunDelta, ..]) has the new tokens of all runs since the message before. ("prompt", run, logprobs) has the next log-probabilities
of a run's prompt, None for its first token; they are sent before the run's first delta. ("attention", token_ids, run, shape, numbers) has
the next values of a run's attention weights (T, N), for T output tokens and N source tokens; they are sent before the run's last delta. No
message exceeds `limits.MESSAGE_BYTES`.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from service.generation.request import Attention, Delta, FinishReason, TokenLogprob
from service.generation.run import Run
from service.pools.limits import PART_BYTES
from service.pools.wire import Piece, Pieces, pieces_of
from service.telemetry.usage import Usage

_LOGPROBS_AT_A_TIME = PART_BYTES // 64  # most entries in a message; a packed entry takes less than 64 bytes

Message = tuple[Any, ...]


class RunDelta(NamedTuple):
    """New tokens of the run at index `run`, and the run's usage after them."""

    run: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, run: int, delta: Delta, usage: Usage) -> "RunDelta":
        counts = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        return cls(run, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason, delta.stop_reason, *counts)


def in_deltas(made: Sequence[RunDelta]) -> Iterator[Message]:
    """Split deltas into messages of at most the maximum size."""
    message: list[RunDelta] = []
    numbers = 0
    for each in made:
        size = sum([1 + len(logprob.top) for logprob in each.logprobs]) + len(each.token_ids) + len(each.text)
        if message and numbers + size > _LOGPROBS_AT_A_TIME:
            yield "deltas", message
            message, numbers = [], 0
        message.append(each)
        numbers += size
    if message:
        yield "deltas", message


def prompt_parts(run: int, logprobs: Iterable[TokenLogprob | None]) -> Iterator[Message]:
    """Split a prompt's log-probabilities into messages of at most the maximum size."""
    message: list[TokenLogprob | None] = []
    numbers = 0
    for each in logprobs:  # `logprobs` is lazy: reading an entry creates it
        message.append(each)
        numbers += 1 if each is None else 1 + len(each.top)
        if numbers >= _LOGPROBS_AT_A_TIME:
            yield "prompt", run, message
            message, numbers = [], 0
    if message:
        yield "prompt", run, message


def attention_parts(run: int, attention: Attention) -> Iterator[Message]:
    for piece in pieces_of(run, attention.weights):
        yield "attention", attention.token_ids, *piece


class Receiver:
    """Passes the messages of one stream to the runs that they belong to."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs, self._pieces = runs, Pieces()

    def give(self, message: Message) -> None:
        match message:
            case "deltas", deltas:
                for each in deltas:
                    self._give(RunDelta(*each))
            case "prompt", run, logprobs:
                self._runs[run].prompt_logprobs.extend([None if each is None else TokenLogprob(*each) for each in logprobs])
            case "attention", token_ids, *piece:
                part = Piece(*piece)
                if (weights := self._pieces.join(part)) is not None:
                    self._runs[part.array].attention = Attention(token_ids, weights)

    def _give(self, made: RunDelta) -> None:
        run = self._runs[made.run]
        usage = run.usage
        usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens = made[-3:]
        if usage.first_token is None and usage.completion_tokens:
            usage.first_token = time.monotonic()
        logprobs = tuple([TokenLogprob(*each) for each in made.logprobs])
        run.give(Delta(made.text, made.token_ids, logprobs, made.finish_reason, made.stop_reason))
