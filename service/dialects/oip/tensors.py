"""Converts tensors of the Open Inference Protocol to model inputs, and the rows of an answer to tensors.

Each kind of model accepts these input tensors:

    encoder, token classifier   text                      or  input_ids, attention_mask
    reranker                    text, text_pair           or  input_ids, attention_mask
    classifier                  text [, text_pair]        or  input_ids, attention_mask

A model whose graph needs token types accepts no ids, since ids alone do not show where the second text of a pair begins. A
tensor is sent as JSON, flat or nested, or as bytes after the JSON. Both give the same inputs.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.call import JSON_LENGTH_HEADER
from service.catalog import Served
from service.dialects.oip.schemas import InferRequest, InputTensor
from service.encoding import sparse
from service.encoding.model import Model
from service.encoding.request import EncodeAnswer
from service.errors import InvalidRequest, ServiceError
from service.http.routing import read
from service.runtime.onnx import Array
from service.tokenization.texts import Input

TEXT, TEXT_PAIR = "text", "text_pair"

INPUTS: dict[str, dict[str, Any]] = {
    TEXT: {"name": TEXT, "datatype": "BYTES", "shape": [-1]},
    TEXT_PAIR: {"name": TEXT_PAIR, "datatype": "BYTES", "shape": [-1]},
    contract.INPUT_IDS: {"name": contract.INPUT_IDS, "datatype": "INT64", "shape": [-1, -1]},
    contract.ATTENTION_MASK: {"name": contract.ATTENTION_MASK, "datatype": "INT64", "shape": [-1, -1]},
}
_BY_IDS = (contract.INPUT_IDS, contract.ATTENTION_MASK)


def ways_of(model: Served) -> list[tuple[str, ...]]:
    """Return the sets of input tensors that this model accepts, or an empty list if the model generates text."""
    ways: list[tuple[str, ...]] = [(TEXT, TEXT_PAIR)[:count] for count in model.manifest.traits.texts]
    if ways and all(tensor.name != contract.TOKEN_TYPE_IDS for tensor in model.manifest.graph.inputs):
        ways.append(_BY_IDS)
    return ways


def split(body: bytes, json_length: str | None) -> tuple[InferRequest, bytes]:
    """Split a body into its parsed JSON and the bytes after it. `json_length`: the size of the JSON, or None if the whole body is JSON."""
    if json_length is None:
        return read(InferRequest, body), b""
    if not (json_length.isascii() and json_length.isdigit() and len(json_length) < 16 and int(json_length) <= len(body)):
        raise InvalidRequest(f"{JSON_LENGTH_HEADER}={json_length[:40]!r} is not a number of bytes within the body's {len(body)}")
    at = int(json_length)
    return read(InferRequest, body[:at]), body[at:]


def inputs_of(model: Model, tensors: Sequence[InputTensor], tail: bytes) -> list[Input]:
    """Return the inputs in the tensors, one per row. Raises BatchTooLarge if there are too many rows, before it reads any."""
    blobs = _blobs(tensors, tail)
    given = {tensor.name: (tensor, blob) for tensor, blob in zip(tensors, blobs, strict=True)}
    ways = ways_of(model)
    if len(given) < len(tensors) or set(given) not in [set(way) for way in ways]:
        names = ", ".join(tensor.name for tensor in tensors)
        raise InvalidRequest(
            f"model {model.name} takes {' or '.join(' with '.join(way) for way in ways)}. Given: {names[:200]}", param="inputs"
        )
    for tensor in tensors:
        if 0 not in tensor.shape:  # an empty tensor raises another error later
            model.check_size(tensor.shape[0])
    if contract.INPUT_IDS in given:
        return _rows(_numbers(*given[contract.INPUT_IDS]), _numbers(*given[contract.ATTENTION_MASK]))
    texts = _texts(*given[TEXT])
    if TEXT_PAIR not in given:
        return list(texts)
    pairs = _texts(*given[TEXT_PAIR])
    if len(pairs) != len(texts):
        raise InvalidRequest(f"`{TEXT}` has {len(texts)} rows and `{TEXT_PAIR}` {len(pairs)}", param="inputs")
    return list(zip(texts, pairs, strict=True))


def _blobs(tensors: Sequence[InputTensor], tail: bytes) -> list[bytes | None]:
    """Return the bytes of each tensor, or None for a tensor that was sent as JSON."""
    blobs: list[bytes | None] = []
    at = 0
    for tensor in tensors:
        size = tensor.parameters.binary_data_size
        if (size is None) == (tensor.data is None):
            raise InvalidRequest(f"`{tensor.name}` needs either `data` or `parameters.binary_data_size`, and not both", param="inputs")
        blobs.append(None if size is None else tail[at : at + size])
        at += size or 0
    if at != len(tail):
        raise InvalidRequest(
            f"the inputs claim {at} bytes after the JSON and there are {len(tail)}; see {JSON_LENGTH_HEADER}", param="inputs"
        )
    return blobs


def _texts(tensor: InputTensor, blob: bytes | None) -> list[str]:
    _check_tensor(tensor, "BYTES", "[n] or [n, 1]", fits=len(tensor.shape) == 1 or tensor.shape[1:] == [1])
    # Read at most one element more than the shape allows, which is enough to detect surplus elements.
    texts = _elements(tensor) if blob is None else list(islice(_strings(tensor.name, blob), prod(tensor.shape) + 1))
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"`{tensor.name}` holds something other than strings", param="inputs")
    _check_count(tensor, len(texts))
    return texts


def _numbers(tensor: InputTensor, blob: bytes | None) -> NDArray[np.int64]:
    _check_tensor(tensor, "INT64", "[rows, tokens], both at least 1", fits=len(tensor.shape) == 2 and all(tensor.shape))
    if blob is not None:
        if len(blob) % 8:
            raise InvalidRequest(f"`{tensor.name}` has {len(blob)} bytes, which is no number of INT64", param="inputs")
        flat: NDArray[np.int64] = np.frombuffer(blob, "<i8").astype(np.int64, copy=False)
    else:
        elements = _elements(tensor)
        _check_count(tensor, len(elements))
        if not all(type(element) is int and -(2**63) <= element < 2**63 for element in elements):
            raise InvalidRequest(f"`{tensor.name}` holds something other than INT64 numbers", param="inputs")
        flat = np.array(elements, np.int64)
    _check_count(tensor, len(flat))
    return flat.reshape(tensor.shape)


def _rows(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> list[Input]:
    """Return the ids of each row without its padding. Each row of the mask must be ones followed by zeros."""
    if ids.shape != mask.shape:
        raise InvalidRequest(f"input_ids is {list(ids.shape)} and attention_mask {list(mask.shape)}: they must agree", param="inputs")
    lengths = (mask == 1).sum(axis=1)
    wrong = (mask != (np.arange(mask.shape[1]) < lengths[:, None])).any(axis=1) | (lengths == 0)
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidRequest(
            f"attention_mask row {row} is not ones followed by zeros: pad on the right, and give each row at least one token",
            param="inputs",
        )
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


def _check_tensor(tensor: InputTensor, datatype: str, shapes: str, *, fits: bool) -> None:
    if tensor.datatype != datatype:
        raise InvalidRequest(f"`{tensor.name}` is of datatype {datatype}. Given: {tensor.datatype}", param="inputs")
    if not fits:
        raise InvalidRequest(f"`{tensor.name}` has the shape {shapes}. Given: {tensor.shape}", param="inputs")


def _check_count(tensor: InputTensor, count: int) -> None:
    if count != prod(tensor.shape):
        raise InvalidRequest(f"`{tensor.name}` of shape {tensor.shape} has {prod(tensor.shape)} elements. Given: {count}", param="inputs")


def _elements(tensor: InputTensor) -> list[Any]:
    """Return a tensor's JSON data in row-major order. The data may be flat or a list of rows."""
    data = tensor.data or []
    if not any(isinstance(row, list) for row in data):
        return data
    if len(tensor.shape) != 2 or [len(row) if isinstance(row, list) else -1 for row in data] != [tensor.shape[1]] * tensor.shape[0]:
        raise InvalidRequest(f"the nesting of `{tensor.name}` is not that of its shape {tensor.shape}", param="inputs")
    return [element for row in data for element in row]


def _strings(name: str, blob: bytes) -> Iterator[str]:
    """Yield the strings of a BYTES tensor. Each string is its length in bytes (4 bytes, little-endian) and then its UTF-8 bytes."""
    at = 0
    while at < len(blob):
        start = at + 4
        at = start + int.from_bytes(blob[at:start], "little")
        if start > len(blob) or at > len(blob):
            raise InvalidRequest(f"`{name}` ends in the middle of an element", param="inputs")
        try:
            yield blob[start:at].decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"`{name}` is not UTF-8: {error.reason}", param="inputs") from None


def stacked(model: Model, outputs: Sequence[str], answer: EncodeAnswer) -> list[Array]:
    """Return each output of an answer as one array: (B, D), or (B, N, D) padded with zeros to the length N of the longest row. Sparse
    vectors are (B, V) here.
    """
    rows = [row for row in answer.rows if not isinstance(row, ServiceError)]  # all of them, since the request has no errors by item
    return [_stacked(model, output, [row[at] for row in rows]) for at, output in enumerate(outputs)]


def _stacked(model: Model, output: str, rows: Sequence[Array]) -> Array:
    if output in (contract.SPARSE, contract.TOKEN_WEIGHTS) and (about := model.manifest.sparse) is not None:
        dense: Array = np.zeros((len(rows), about.size), np.float32)
        for at, row in enumerate(rows):
            indices, weights = sparse.unpacked(row)
            dense[at, indices] = weights
        return dense
    if rows[0].ndim == 1:
        return np.stack(rows)
    shape = len(rows), max(map(len, rows)), rows[0].shape[1]
    padded: Array = np.zeros(shape, np.float32)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    return padded
