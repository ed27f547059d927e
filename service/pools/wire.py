"""The values sent between a gateway and an engine in another process, and how MessagePack writes them.

They are tuples, lists, dictionaries, strings, numbers, bytes, numpy arrays and the errors of `service/errors.py`. A named tuple arrives as
a plain one. Times of `time.monotonic()` have no meaning in another process, so a deadline is sent as the remaining seconds.
"""

import inspect
import math
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict

from service import errors
from service.encoder_decoder.request import EncoderDecoderRequest
from service.encoding.request import EncodeTask, OnRow, RowOrError
from service.errors import NeverFits, NotReady, Overloaded, ServiceError
from service.generation.request import GenerationRequest
from service.pools.limits import ASKED_BYTES, MESSAGE_BYTES, PART_BYTES
from service.runtime.lanes import Lane
from service.runtime.onnx import Array
from service.states.record import Keep
from service.tokenization.texts import Encoded

_ARRAY, _ERROR = 1, 2  # MessagePack's types of an array and of an error, see `_extension`
_DTYPES = tuple(map(np.dtype, ("<f4", "<f2", "<i4", "<i8", "u1", "?")))
_KINDS = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, ServiceError)}
_SAME = ("outputs", "lane", "client", "tenant", "traceparent", "use_cache")  # fields of an `EncodeTask` that are sent as they are


def pack(message: Any) -> bytes:
    """Return a message as bytes. Raises NeverFits if it is too long."""
    packed: bytes = msgpack.packb(message, default=_extension)
    if len(packed) > MESSAGE_BYTES:
        raise NeverFits(f"the request or its answer has more than the {MESSAGE_BYTES} bytes of a message to a replica: send it in parts")
    return packed


def unpacker() -> Any:
    """Return a MessagePack reader of messages, in which every list is a tuple."""
    return msgpack.Unpacker(use_list=False, ext_hook=_value, max_buffer_size=2 * MESSAGE_BYTES, strict_map_key=False)


def _extension(value: Any) -> Any:
    """Return an array or error as a value that MessagePack can write. If an error's class is not in `service/errors.py`, its nearest base
    class there is used.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        head = struct.pack(f"<BB{value.ndim}I", _DTYPES.index(value.dtype), value.ndim, *value.shape)
        return msgpack.ExtType(_ARRAY, head + value.tobytes())
    if isinstance(value, ServiceError):
        kind = next(each.__name__ for each in type(value).__mro__ if _KINDS.get(each.__name__) is each)
        fields = kind, value.message, value.param, float(getattr(value, "retry_after_s", 0.0))
        return msgpack.ExtType(_ERROR, msgpack.packb(fields))
    raise TypeError(f"a message cannot contain a {type(value).__name__}")


def _value(code: int, packed: bytes) -> Any:
    if code == _ERROR:
        name, message, param, retry_after_s = msgpack.unpackb(packed)
        kind = _KINDS[name]
        return kind(message, retry_after_s=retry_after_s) if issubclass(kind, Overloaded | NotReady) else kind(message, param=param)
    dtype, ndim = packed[:2]
    shape = struct.unpack_from(f"<{ndim}I", packed, 2)
    return np.frombuffer(packed, _DTYPES[dtype], offset=2 + 4 * ndim).reshape(shape)


def seconds_left(deadline: float) -> float:
    return deadline - time.monotonic()


def deadline_in(left_s: float) -> float:
    return time.monotonic() + left_s


# An encoder's inputs and rows ----------------------------------------------------------------------------------------------------------


def pack_inputs(inputs: Sequence[Encoded]) -> list[tuple[Any, Any, int]]:
    """Return, for each input, its token ids, int32 (N,), its token types, uint8 (N,) or None, and its number of unattended tokens."""
    return [
        (np.array(each.ids, np.int32), None if each.type_ids is None else np.array(each.type_ids, np.uint8), each.unattended)
        for each in inputs
    ]


def pack_task(task: EncodeTask, inputs: list[tuple[Any, Any, int]]) -> dict[str, Any]:
    """Return a task, or a part of it, as the fields that a replica needs. `inputs` are results of `pack_inputs`."""
    return {name: getattr(task, name) for name in _SAME} | {"inputs": inputs, "deadline": seconds_left(task.deadline)}


def unpack_task(packed: Mapping[str, Any], on_row: OnRow | None = None) -> EncodeTask:
    inputs = [
        Encoded(ids.tolist(), None if types is None else types.tolist(), len(ids), unattended)
        for ids, types, unattended in packed["inputs"]
    ]
    here = {"inputs": inputs, "lane": Lane(packed["lane"]), "deadline": deadline_in(packed["deadline"])}
    return EncodeTask(**{**packed, **here}, on_row=on_row)


# Arrays that are larger than a message -------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A part of an array that is larger than a message: the array's index and shape, and its next values as a flat array."""

    array: int
    shape: tuple[int, ...]
    numbers: Any


def pieces_of(index: int, array: Array) -> Iterator[Piece]:
    """Split an array into pieces, each short enough for a message."""
    flat = array.reshape(-1)
    step = PART_BYTES // array.itemsize
    for first in range(0, max(len(flat), 1), step):
        yield Piece(index, array.shape, flat[first : first + step])


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
    """Yield ("rows", [(index, row), ..]) with as many rows as fit into a message, and ("piece", *Piece) for larger rows. Array k of n in
    the row at `index` is the piece's array `index * n + k`.
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
        message.append((at, row))
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
