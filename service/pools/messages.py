"""The messages of a text stream from a replica to a gateway. Both processes handle messages as the named tuples below, and send them as
plain tuples.

The order is Accepted, then Deltas as they are made, then Ended. Failed may replace all remaining messages. The log-probabilities of a run's
prompt are sent before the run's first delta, and its attention weights before its last delta. No message exceeds `limits.MESSAGE_BYTES`.
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

PlainLogprob = tuple[Any, ...]  # the fields of a TokenLogprob


class Accepted(NamedTuple):
    """All runs are queued. `numerics` names the arithmetic of the engine (see `states/numerics.py`)."""

    numerics: str = ""


class RunDelta(NamedTuple):
    """New tokens of the run at index `run`, and the run's usage after them."""

    run: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PlainLogprob, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, run: int, delta: Delta, usage: Usage) -> "RunDelta":
        logprobs = tuple([tuple(each) for each in delta.logprobs])
        counts = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        return cls(run, delta.text, delta.token_ids, logprobs, delta.finish_reason, delta.stop_reason, *counts)


class Deltas(NamedTuple):
    """The new tokens of all runs since the previous message."""

    deltas: Sequence[RunDelta]


class PromptPart(NamedTuple):
    """The next log-probabilities of a run's prompt; None for the prompt's first token."""

    run: int
    logprobs: tuple[PlainLogprob | None, ...]


class AttentionPart(NamedTuple):
    """The next values of a run's attention weights (T, N): T output tokens, N source tokens. `shape` is (T, N)."""

    token_ids: tuple[int, ...]
    run: int
    shape: tuple[int, ...]
    numbers: Any


class Ended(NamedTuple):
    """All runs have ended."""


class Failed(NamedTuple):
    """The request was rejected, or a run has failed."""

    error: tuple[Any, ...]  # a packed `Refusal`


Message = Accepted | Deltas | PromptPart | AttentionPart | Ended | Failed
_KINDS: dict[str, Any] = {
    "accepted": Accepted,
    "made": Deltas,
    "prompt": PromptPart,
    "attention": AttentionPart,
    "ended": Ended,
    "failed": Failed,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def plain(message: Message) -> tuple[Any, ...]:
    """Return a message as a plain tuple: the name of the message's class, then the fields."""
    if isinstance(message, Deltas):
        return "made", [tuple(each) for each in message.deltas]
    return _NAMES[type(message)], *message


def named(packed: tuple[Any, ...]) -> Message:
    """Return the message that `plain` has packed."""
    kind, *fields = packed
    if kind == "made":
        return Deltas([RunDelta(*each) for each in fields[0]])
    message: Message = _KINDS[kind](*fields)
    return message


def in_deltas(made: Sequence[RunDelta]) -> Iterator[Deltas]:
    """Split deltas into messages of at most the maximum size."""
    message: list[RunDelta] = []
    numbers = 0
    for each in made:
        size = sum([1 + len(logprob[2]) for logprob in each.logprobs]) + len(each.token_ids) + len(each.text)
        if message and numbers + size > _LOGPROBS_AT_A_TIME:
            yield Deltas(message)
            message, numbers = [], 0
        message.append(each)
        numbers += size
    if message:
        yield Deltas(message)


def prompt_parts(run: int, logprobs: Iterable[TokenLogprob | None]) -> Iterator[PromptPart]:
    """Split a prompt's log-probabilities into messages of at most the maximum size."""
    message: list[PlainLogprob | None] = []
    numbers = 0
    for each in logprobs:  # `logprobs` is lazy: reading an entry creates it
        message.append(None if each is None else tuple(each))
        numbers += 1 if each is None else 1 + len(each.top)
        if numbers >= _LOGPROBS_AT_A_TIME:
            yield PromptPart(run, tuple(message))
            message, numbers = [], 0
    if message:
        yield PromptPart(run, tuple(message))


def attention_parts(run: int, attention: Attention) -> Iterator[AttentionPart]:
    for piece in pieces_of(run, attention.weights):
        yield AttentionPart(attention.token_ids, *piece)


class Receiver:
    """Passes the messages of one stream to the runs that they belong to."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs, self._pieces = runs, Pieces()

    def give(self, message: Message) -> None:
        if isinstance(message, Deltas):
            for each in message.deltas:
                self._give(each)
        elif isinstance(message, PromptPart):
            logprobs = [None if each is None else TokenLogprob(*each) for each in message.logprobs]
            self._runs[message.run].prompt_logprobs.extend(logprobs)
        elif isinstance(message, AttentionPart):
            weights = self._pieces.join(Piece(message.run, message.shape, message.numbers))
            if weights is not None:
                self._runs[message.run].attention = Attention(message.token_ids, weights)

    def _give(self, made: RunDelta) -> None:
        run = self._runs[made.run]
        usage = run.usage
        usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens = made[-3:]
        if usage.first_token is None and usage.completion_tokens:
            usage.first_token = time.monotonic()
        logprobs = tuple([TokenLogprob(*each) for each in made.logprobs])
        run.give(Delta(made.text, made.token_ids, logprobs, made.finish_reason, made.stop_reason))
