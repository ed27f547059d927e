"""What crosses between a gateway and an engine in another process: tuples, strings, numbers, bytes and numpy arrays, and nothing else.

Ray carries them as pickles within its cluster; so none of them names a class of ours, and an exception crosses as what it says.
Moments (`time.monotonic()`) mean nothing elsewhere: a deadline crosses as the seconds that are left.
"""

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from service import errors
from service.errors import NotReady, Overloaded, ServiceError
from service.generation.request import Attention, Delta, GenerationRequest, TokenLogprob, Usage
from service.generation.run import Run
from service.runtime import Array
from service.tokenization import Encoded
from service.writing.request import WritingRequest

_KINDS = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, ServiceError)}

Refusal = tuple[str, str, str | None, float]  # kind, message, param, retry_after_s
Made = tuple[
    int, str, tuple[int, ...], tuple[Any, ...], str | None, str | int | None, tuple[int, int, int], tuple[Any, ...], tuple[Any, ...] | None
]


def seconds_left(deadline: float) -> float:
    return deadline - time.monotonic()


def deadline_in(left_s: float) -> float:
    return time.monotonic() + left_s


# Errors --------------------------------------------------------------------------------------------------------------------------------


def pack_error(error: ServiceError) -> Refusal:
    """An error of a class that `service/errors.py` does not have crosses as the nearest one that it has."""
    kind = next(each.__name__ for each in type(error).__mro__ if _KINDS.get(each.__name__) is each)
    return kind, error.message, error.param, float(getattr(error, "retry_after_s", 0.0))


def unpack_error(packed: Refusal) -> ServiceError:
    name, message, param, retry_after_s = packed
    kind = _KINDS[name]
    if issubclass(kind, Overloaded | NotReady):
        return kind(message, retry_after_s=retry_after_s)
    return kind(message, param=param)


# An encoder's inputs and rows ----------------------------------------------------------------------------------------------------------


def pack_inputs(inputs: Sequence[Encoded]) -> list[tuple[Any, Any]]:
    """Of each input its ids, int32 (N,), and its types, uint8 (N,) or None."""
    return [(np.array(each.ids, np.int32), None if each.type_ids is None else np.array(each.type_ids, np.uint8)) for each in inputs]


def unpack_inputs(packed: Sequence[tuple[Any, Any]]) -> list[Encoded]:
    return [Encoded(ids.tolist(), None if types is None else types.tolist(), len(ids)) for ids, types in packed]


def pack_rows(rows: Sequence[Array | ServiceError]) -> list[Any]:
    return [pack_error(row) if isinstance(row, ServiceError) else row for row in rows]


def unpack_rows(packed: Sequence[Any]) -> list[Array | ServiceError]:
    return [unpack_error(row) if isinstance(row, tuple) else row for row in packed]


# Requests for text, and deltas --------------------------------------------------------------------------------------------------------


class _Asked(BaseModel):
    """All of one request, for a decoder or for an encoder-decoder; each `deadline` is the seconds that are left."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    generations: tuple[GenerationRequest, ...] = ()
    writings: tuple[WritingRequest, ...] = ()


def pack_requests(requests: Sequence[GenerationRequest]) -> bytes:
    asked = [replace(request, deadline=seconds_left(request.deadline)) for request in requests]
    writings = tuple(request for request in asked if isinstance(request, WritingRequest))
    generations = tuple(request for request in asked if not isinstance(request, WritingRequest))
    return _Asked(generations=generations, writings=writings).model_dump_json().encode()


def unpack_requests(packed: bytes) -> list[GenerationRequest]:
    asked = _Asked.model_validate_json(packed)
    return [replace(request, deadline=deadline_in(request.deadline)) for request in (*asked.generations, *asked.writings)]


def pack_made(index: int, delta: Delta, usage: Usage, prompt_logprobs: Sequence[TokenLogprob | None], attention: Attention | None) -> Made:
    """A delta of the run at `index` with what its usage is now, and once in a run the log-probabilities of its prompt and the attention."""
    return (
        index,
        delta.text,
        delta.token_ids,
        _plain(delta.logprobs),
        delta.finish_reason,
        delta.stop_reason,
        (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        _plain(prompt_logprobs),
        None if attention is None else tuple(attention),
    )


def unpack_made(made: Made, runs: Sequence[Run]) -> None:
    """Give the delta to the run that waits for it here."""
    index, text, token_ids, logprobs, finish_reason, stop_reason, usage, prompt_logprobs, attention = made
    run = runs[index]
    _note(run.usage, usage)
    if prompt_logprobs:
        run.prompt_logprobs = [None if each is None else TokenLogprob(*each) for each in prompt_logprobs]
    if attention is not None:
        run.attention = Attention(*attention)
    delta = Delta(text, token_ids, tuple([TokenLogprob(*each) for each in logprobs]), finish_reason, stop_reason)  # type: ignore[arg-type]
    run.give(delta)


def _note(usage: Usage, counts: tuple[int, int, int]) -> None:
    now = time.monotonic()
    usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens = counts
    if usage.first_token is None and usage.completion_tokens:
        usage.first_token = now


def _plain(logprobs: Sequence[TokenLogprob | None]) -> tuple[Any, ...]:
    return tuple([None if each is None else tuple(each) for each in logprobs])
