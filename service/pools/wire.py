"""What crosses between a gateway and an engine in another process: tuples, strings, numbers, bytes and numpy arrays, and nothing else.

Ray carries them as pickles within its cluster; so none of them names a class of this project, and an error crosses as its fields.
Moments (`time.monotonic()`) mean nothing elsewhere: a deadline crosses as the seconds that are left.
"""

import inspect
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from service import errors
from service.errors import NeverFits, NotReady, Overloaded, ServiceError
from service.generation.request import GenerationRequest
from service.pools.limits import ASKED_BYTES, PART_BYTES
from service.runtime.lanes import Lane
from service.runtime.onnx import Array
from service.seq2seq.request import WritingRequest
from service.tokenization.texts import Encoded

_KINDS = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, ServiceError)}

Refusal = tuple[str, str, str | None, float]  # kind, message, param, retry_after_s


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


def pack_options(*, lane: Lane, deadline: float, **options: Any) -> dict[str, Any]:
    """What `EncoderEngine.run` takes beside the inputs, by its names there."""
    return {**options, "lane": int(lane), "deadline": seconds_left(deadline)}


def unpack_options(packed: dict[str, Any]) -> dict[str, Any]:
    return {**packed, "lane": Lane(packed["lane"]), "deadline": deadline_in(packed["deadline"])}


# Arrays that are larger than a message -------------------------------------------------------------------------------------------------

Piece = tuple[int, tuple[int, ...], Any]  # which array it is of, that one's shape, and the next numbers of it, flat


def pieces_of(index: int, array: Array) -> Iterator[Piece]:
    """The array in runs of numbers, each short enough for a message."""
    flat = array.reshape(-1)
    step = PART_BYTES // array.itemsize
    for first in range(0, max(len(flat), 1), step):
        yield index, array.shape, flat[first : first + step]


class Pieces:
    """Puts arrays together again, as the pieces of each come in their order."""

    def __init__(self) -> None:
        self._there: dict[int, list[Any]] = {}

    def join(self, index: int, shape: tuple[int, ...], numbers: Any) -> Array | None:
        """The array, once its last piece is there."""
        there = self._there.setdefault(index, [])
        there.append(numbers)
        if sum(map(len, there)) < math.prod(shape):
            return None
        del self._there[index]
        whole: Array = (there[0] if len(there) == 1 else np.concatenate(there)).reshape(shape)
        return whole


def rows_in_messages(rows: Sequence[tuple[int, Array | ServiceError]]) -> Iterator[tuple[Any, ...]]:
    """("rows", [(index, row), ..]) with as many as a message can hold, and ("piece", ..) of each row that is larger."""
    message: list[tuple[int, Any]] = []
    size_bytes = 0
    for at, row in rows:
        nbytes = 0 if isinstance(row, ServiceError) else row.nbytes
        if isinstance(row, np.ndarray) and nbytes > PART_BYTES:
            for piece in pieces_of(at, row):
                yield "piece", *piece
            continue
        if message and size_bytes + nbytes > PART_BYTES:
            yield "rows", message
            message, size_bytes = [], 0
        message.append((at, pack_rows([row])[0]))
        size_bytes += nbytes
    if message:
        yield "rows", message


# Requests for text ---------------------------------------------------------------------------------------------------------------------


class TextRequest(BaseModel):
    """One API request, for a decoder or for an encoder-decoder. Runs that differ by their seeds alone cross as one with many seeds, so that
    128 runs of a long prompt carry it once. Each `deadline` is the seconds that are left."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    generations: tuple[tuple[GenerationRequest, tuple[int, ...]], ...] = ()
    writings: tuple[tuple[WritingRequest, tuple[int, ...]], ...] = ()


def pack_requests(requests: Sequence[GenerationRequest]) -> bytes:
    """Raises NeverFits for what is larger than a message may be."""
    groups: list[tuple[GenerationRequest, list[int]]] = []
    for request in requests:
        alike = replace(request, sampling=replace(request.sampling, seed=0))
        if groups and groups[-1][0] == alike:
            groups[-1][1].append(request.sampling.seed)
        else:
            groups.append((alike, [request.sampling.seed]))
    asked = [(replace(request, deadline=seconds_left(request.deadline)), tuple(seeds)) for request, seeds in groups]
    writings = tuple((request, seeds) for request, seeds in asked if isinstance(request, WritingRequest))
    generations = tuple((request, seeds) for request, seeds in asked if not isinstance(request, WritingRequest))
    packed = TextRequest(generations=generations, writings=writings).model_dump_json().encode()
    if len(packed) > ASKED_BYTES:
        raise NeverFits(
            f"the request has {len(packed)} bytes on its way to a replica and the most is {ASKED_BYTES}: send its prompts in parts"
        )
    return packed


def unpack_requests(packed: bytes) -> list[GenerationRequest]:
    asked = TextRequest.model_validate_json(packed)
    requests = []
    for request, seeds in (*asked.generations, *asked.writings):
        here = replace(request, deadline=deadline_in(request.deadline))
        requests += [replace(here, sampling=replace(here.sampling, seed=seed)) for seed in seeds]
    return requests
