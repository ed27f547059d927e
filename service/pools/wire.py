"""The values sent between a gateway and an engine in another process: tuples, strings, numbers, bytes and numpy arrays only.

`transport.py` writes the values as MessagePack, and an error is sent as its fields. Times of `time.monotonic()` have no meaning in another
process, so a deadline is sent as the remaining seconds.
"""

import inspect
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from service import errors
from service.encoder_decoder.request import EncoderDecoderRequest
from service.encoding.request import EncodeTask, OnRow, RowOrError
from service.errors import NeverFits, NotReady, Overloaded, ServiceError
from service.generation.request import GenerationRequest
from service.pools.limits import ASKED_BYTES, PART_BYTES
from service.runtime.lanes import Lane
from service.runtime.onnx import Array
from service.states.record import Keep
from service.tokenization.texts import Encoded

_KINDS = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, ServiceError)}


class Refusal(NamedTuple):
    """The fields of a `ServiceError`."""

    kind: str
    message: str
    param: str | None
    retry_after_s: float


class EncodeMessage(NamedTuple):
    """An `EncodeTask`, or a part of it. `inputs` contains, for each input, its token ids, int32 (N,), and its token types, uint8 (N,) or
    None.
    """

    inputs: list[tuple[Any, Any]]
    outputs: tuple[str, ...]
    lane: int
    left_s: float
    client: str
    tenant: str
    traceparent: str | None
    use_cache: bool


class EncodeDone(NamedTuple):
    """The last message of an encoding: the rows that were not sent before, each a tuple of arrays or a `Refusal`, and the seconds that the
    inputs spent in the queue and in computation, summed over the inputs.
    """

    rows: list[Any]
    queue_s: float
    inference_s: float


class Piece(NamedTuple):
    """A part of an array that is larger than a message: the array's index and shape, and its next values as a flat array."""

    array: int
    shape: tuple[int, ...]
    numbers: Any


def seconds_left(deadline: float) -> float:
    return deadline - time.monotonic()


def deadline_in(left_s: float) -> float:
    return time.monotonic() + left_s


# Errors --------------------------------------------------------------------------------------------------------------------------------


def pack_error(error: ServiceError) -> tuple[Any, ...]:
    """Return an error as the fields of a `Refusal`. If the error's class is not in `service/errors.py`, its nearest base class there is
    used.
    """
    kind = next(each.__name__ for each in type(error).__mro__ if _KINDS.get(each.__name__) is each)
    return tuple(Refusal(kind, error.message, error.param, float(getattr(error, "retry_after_s", 0.0))))


def unpack_error(packed: Sequence[Any]) -> ServiceError:
    refusal = Refusal(*packed)
    kind = _KINDS[refusal.kind]
    if issubclass(kind, Overloaded | NotReady):
        return kind(refusal.message, retry_after_s=refusal.retry_after_s)
    return kind(refusal.message, param=refusal.param)


# An encoder's inputs and rows ----------------------------------------------------------------------------------------------------------


def pack_inputs(inputs: Sequence[Encoded]) -> list[tuple[Any, Any]]:
    """Return inputs in the form of the field `inputs` of `EncodeMessage`."""
    return [(np.array(each.ids, np.int32), None if each.type_ids is None else np.array(each.type_ids, np.uint8)) for each in inputs]


def unpack_inputs(packed: Sequence[tuple[Any, Any]]) -> list[Encoded]:
    return [Encoded(ids.tolist(), None if types is None else types.tolist(), len(ids)) for ids, types in packed]


def pack_rows(rows: Sequence[RowOrError]) -> list[Any]:
    return [pack_error(row) if isinstance(row, ServiceError) else row for row in rows]


def unpack_rows(packed: Sequence[Any]) -> list[RowOrError]:
    return [unpack_error(row) if isinstance(row[0], str) else tuple(row) for row in packed]  # an error begins with its kind


def pack_task(task: EncodeTask, inputs: list[tuple[Any, Any]]) -> tuple[Any, ...]:
    """Return a task as an `EncodeMessage` with these packed inputs."""
    left_s = seconds_left(task.deadline)
    return tuple(EncodeMessage(inputs, task.outputs, int(task.lane), left_s, task.client, task.tenant, task.traceparent, task.use_cache))


def unpack_task(packed: Sequence[Any], on_row: OnRow | None = None) -> EncodeTask:
    message = EncodeMessage(*packed)
    return EncodeTask(
        inputs=unpack_inputs(message.inputs),
        outputs=tuple(message.outputs),
        lane=Lane(message.lane),
        deadline=deadline_in(message.left_s),
        client=message.client,
        tenant=message.tenant,
        traceparent=message.traceparent,
        use_cache=message.use_cache,
        on_row=on_row,
    )


# Arrays that are larger than a message -------------------------------------------------------------------------------------------------


def pieces_of(index: int, array: Array) -> Iterator[tuple[Any, ...]]:
    """Split an array into `Piece` tuples, each short enough for a message."""
    flat = array.reshape(-1)
    step = PART_BYTES // array.itemsize
    for first in range(0, max(len(flat), 1), step):
        yield tuple(Piece(index, array.shape, flat[first : first + step]))


class Pieces:
    """Joins pieces to arrays. The pieces of one array must arrive in order."""

    def __init__(self) -> None:
        self._received: dict[int, list[Any]] = {}

    def join(self, piece: Piece) -> Array | None:
        """Add a piece. Returns the whole array after its last piece, else None."""
        received = self._received.setdefault(piece.array, [])
        received.append(piece.numbers)
        if sum(map(len, received)) < math.prod(piece.shape):
            return None
        del self._received[piece.array]
        whole: Array = (received[0] if len(received) == 1 else np.concatenate(received)).reshape(piece.shape)
        return whole


def rows_in_messages(rows: Sequence[tuple[int, RowOrError]]) -> Iterator[tuple[Any, ...]]:
    """Pack rows: yield ("rows", [(index, row), ..]) with as many rows as fit into a message, and ("piece", *Piece) for larger rows. Array k
    of n in the row at `index` is the piece's array `index * n + k`.
    """
    message: list[tuple[int, Any]] = []
    size_bytes = 0
    for at, row in rows:
        nbytes = 0 if isinstance(row, ServiceError) else sum([array.nbytes for array in row])
        if not isinstance(row, ServiceError) and nbytes > PART_BYTES:
            for k, array in enumerate(row):
                for piece in pieces_of(at * len(row) + k, array):
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


class Variant(NamedTuple):
    """The fields in which the runs of one prompt differ."""

    seed: int
    known: tuple[int, ...]
    keep: Keep | None
    checkpoint: str


class TextRequest(BaseModel):
    """One API request for a decoder or an encoder-decoder. Runs that differ only in the fields of `Variant` are sent as one request with
    several variants, so that a long prompt of 128 runs is sent once. Each `deadline` is the remaining time in seconds.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    generations: tuple[tuple[GenerationRequest, tuple[Variant, ...]], ...] = ()
    encoder_decoders: tuple[tuple[EncoderDecoderRequest, tuple[Variant, ...]], ...] = ()


def pack_requests(requests: Sequence[GenerationRequest]) -> bytes:
    """Return the runs of one API request as one message. Raises NeverFits if the message is larger than allowed."""
    groups: list[tuple[GenerationRequest, list[Variant]]] = []
    for request in requests:
        variant = Variant(request.sampling.seed, request.known, request.keep, request.checkpoint)
        alike = replace(request, sampling=replace(request.sampling, seed=0), known=(), keep=None, checkpoint="")
        if groups and groups[-1][0] == alike:
            groups[-1][1].append(variant)
        else:
            groups.append((alike, [variant]))
    asked = [(replace(request, deadline=seconds_left(request.deadline)), tuple(variants)) for request, variants in groups]
    encoder_decoders = tuple((request, variants) for request, variants in asked if isinstance(request, EncoderDecoderRequest))
    generations = tuple((request, variants) for request, variants in asked if not isinstance(request, EncoderDecoderRequest))
    packed = TextRequest(generations=generations, encoder_decoders=encoder_decoders).model_dump_json().encode()
    if len(packed) > ASKED_BYTES:
        raise NeverFits(
            f"the request has {len(packed)} bytes on its way to a replica and the most is {ASKED_BYTES}: send its prompts in parts"
        )
    return packed


def unpack_requests(packed: bytes) -> list[GenerationRequest]:
    asked = TextRequest.model_validate_json(packed)
    requests = []
    for request, variants in (*asked.generations, *asked.encoder_decoders):
        here = replace(request, deadline=deadline_in(request.deadline))
        for each in variants:
            sampling = replace(here.sampling, seed=each.seed)
            requests.append(replace(here, sampling=sampling, known=each.known, keep=each.keep, checkpoint=each.checkpoint))
    return requests
