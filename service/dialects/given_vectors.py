"""Vectors that a request sends in place of a text, in every form in which `/v1/embeddings` gives them.

Numbers of the types float, float16 and float32 are compared as they are, but an `embedding` by its cosine. The other types have lost the
length of a vector, which is 1 here.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from service.dialects.search_outputs import MatrixType
from service.encoding import sparse, vectors
from service.encoding.model import Model
from service.errors import InvalidRequest, NeverFits
from service.http.fields import Body
from service.http.routing import Many
from service.runtime.onnx import Array

Way = Literal["dense", "sparse", "multivector"]

MOST_NUMBERS = 2**26  # of all vectors of a request
_LARGEST = 65_504.0  # largest size of a number, float16's: sums of products of such numbers are finite in float32
_TYPES: dict[str, str] = {"float32": "<f4", "float16": "<f2", "int8": "i1", "uint8": "u1", "binary": "u1", "ubinary": "u1"}


class GivenSparse(Body, strict=True):
    indices: Many[int] = Field(min_length=1, description="Ascending, each once.")
    values: Many[float] = Field(description="The weight of each index, above 0.")


class GivenMatrix(Body, strict=True):
    data: str | Many[Many[float]] = Field(description="Base64 of the numbers, row by row, or a list of vectors.")
    shape: tuple[int, int] | None = Field(None, description="With base64: how many vectors, and numbers (or packed bytes) of each.")
    dtype: MatrixType = Field("float16", description="Type of a number.")


class Document(Body, strict=True):
    """A text, or its vectors, for instance an item of the answer of `/v1/embeddings`. A text beside vectors is only sent back."""

    text: str | None = None
    embedding: str | Many[float] | None = Field(None, description="A dense vector: a list, or base64 of little-endian float32.")
    encoding_format: vectors.Form = Field("float", description="Type of the numbers of `embedding`, if it is a list.")
    sparse: GivenSparse | None = None
    multivector: GivenMatrix | Many[Many[float]] | None = Field(None, description="A token matrix: one vector for each token.")

    @model_validator(mode="after")
    def _has_something(self) -> Self:
        if self.text is None and not self.ways:
            raise PydanticCustomError("no_content", "Field required: `text`, or one of `embedding`, `sparse` and `multivector`")
        return self

    @property
    def ways(self) -> list[Way]:
        """Return which vectors are here."""
        given: dict[Way, Any] = {"dense": self.embedding, "sparse": self.sparse, "multivector": self.multivector}
        return [way for way, value in given.items() if value is not None]


Item = str | Document  # a text, or an object with vectors


def as_item(given: str | Document) -> Item:
    """Return the text of an object that has no vectors."""
    return given if isinstance(given, str) or given.ways else str(given.text)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A token matrix in the type in which it was sent: 8 times smaller for bits than in float32, so it is converted when it is compared."""

    numbers: NDArray[Any]  # (n, D) or, with packed bits, (n, D / 8)
    dtype: str

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def size(self) -> int:
        return self.numbers.size * (8 if self.dtype in ("binary", "ubinary") else 1)

    @property
    def width(self) -> int:
        return self.size // len(self.numbers)

    def floats(self) -> Array:
        """Return the matrix (n, D) in float32, or in float16 if it was sent so."""
        if self.dtype in ("float16", "float32"):
            return self.numbers
        if self.dtype in ("binary", "ubinary"):
            signed: Array = np.unpackbits(self.numbers, axis=1).astype(np.float32) * np.float32(2) - np.float32(1)
        else:
            signed = self.numbers.astype(np.float32) - (128 if self.dtype == "uint8" else 0)
        lengths = np.linalg.norm(signed, axis=1, keepdims=True).astype(np.float32)
        unit: Array = signed / np.maximum(lengths, np.float32(1e-12))
        return unit


def read_all(items: Sequence[tuple[str, Document]], ways: Sequence[Way], model: Model) -> list[tuple[Any, ...]]:
    """Return the vectors of each item, one for each of `ways`: a unit vector (D,), a sparse vector, or a `Matrix`.

    `items`: objects with the names of their fields, for errors. Raises InvalidRequest if a vector is missing or does not fit the model, and
    NeverFits if the request has too many numbers.
    """
    rows, count = [], 0
    for name, item in items:
        rows.append(tuple([_READ[way](item, f"{name}.{_FIELDS[way]}", model) for way in ways]))
        count += sum(each.size for each in rows[-1])
        if count > MOST_NUMBERS:
            raise NeverFits(f"the vectors up to `{name}` have {count} numbers, and the most is {MOST_NUMBERS}: send them in parts")
    return rows


def _dense(item: Document, field: str, model: Model) -> Array:
    if isinstance(item.embedding, str):
        numbers = _from_base64(item.embedding, "float32", field)[None]
        matrix = Matrix(numbers, "float32")
    else:
        dtype = "float32" if item.encoding_format in ("float", "base64") else item.encoding_format
        matrix = Matrix(_from_lists([item.embedding or []], dtype, field), dtype)
    _check(matrix, model.manifest.width, field, model)
    vector = matrix.floats()[0].astype(np.float64)
    if not (length := float(np.linalg.norm(vector))):
        raise InvalidRequest(f"`{field}` has only zeros, so it has no direction: send another vector", param=field)
    unit: Array = (vector / length).astype(np.float32)
    return unit


def _sparse(item: Document, field: str, model: Model) -> sparse.Packed:
    about, given = model.manifest.sparse, item.sparse
    assert about is not None
    assert given is not None
    if len(given.indices) != len(given.values):
        raise InvalidRequest(f"`{field}` has {len(given.indices)} indices and {len(given.values)} values: send one for each", param=field)
    if not (min(given.indices) >= 0 and max(given.indices) < about.size):
        raise InvalidRequest(f"`{field}.indices` must be from 0 to {about.size - 1} for model {model.name}", param=f"{field}.indices")
    indices, values = np.array(given.indices, np.int32), np.array(given.values, np.float64)
    if not (np.diff(indices) > 0).all():
        raise InvalidRequest(f"`{field}.indices` must ascend, each once: sort them with their values", param=f"{field}.indices")
    if not ((values > 0) & (values <= _LARGEST)).all():
        raise InvalidRequest(f"`{field}.values` must be above 0 and at most {_LARGEST:.0f}: leave zeros out", param=f"{field}.values")
    return sparse.packed(indices, values.astype(np.float32))


def _matrix(item: Document, field: str, model: Model) -> Matrix:
    about, given = model.manifest.multivector, item.multivector
    assert about is not None
    assert given is not None
    data, dtype = (given.data, given.dtype) if isinstance(given, GivenMatrix) else (given, "float32")
    if not isinstance(data, str):
        dtype = "float32" if dtype == "float16" else dtype
        matrix = Matrix(_from_lists(data, dtype, field), dtype)
    else:
        shape = given.shape if isinstance(given, GivenMatrix) else None
        numbers = _from_base64(data, dtype, f"{field}.data")
        if shape is None or min(shape) < 1 or shape[0] * shape[1] != len(numbers):
            raise InvalidRequest(
                f"`{field}.shape` is {shape and list(shape)}, but `data` has {len(numbers)} numbers of the type {dtype}: send the shape "
                "that they have",
                param=f"{field}.shape",
            )
        matrix = Matrix(numbers.reshape(shape), dtype)
    if len(matrix.numbers) > (most := model.manifest.limits.max_tokens):
        raise InvalidRequest(
            f"`{field}` has {len(matrix.numbers)} vectors, and model {model.name} gives at most {most} for a text: send fewer", param=field
        )
    _check(matrix, about.width, field, model)
    return matrix


_READ: dict[Way, Any] = {"dense": _dense, "sparse": _sparse, "multivector": _matrix}
_FIELDS: dict[Way, str] = {"dense": "embedding", "sparse": "sparse", "multivector": "multivector"}


def _from_base64(text: str, dtype: str, field: str) -> NDArray[Any]:
    """Return the numbers, (n,). Bits stay packed in uint8, those of `binary` without its offset."""
    size = np.dtype(_TYPES[dtype]).itemsize
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"`{field}` is not base64: encode the numbers' little-endian bytes", param=field) from None
    if len(content) % size or not content:
        raise InvalidRequest(f"`{field}` has {len(content)} bytes, which are no numbers of {size} bytes: see its type", param=field)
    numbers: NDArray[Any] = np.frombuffer(content, _TYPES[dtype])
    return numbers ^ np.uint8(128) if dtype == "binary" else numbers


def _from_lists(rows: Sequence[Sequence[float]], dtype: str, field: str) -> NDArray[Any]:
    """Return the numbers of lists, (n, D). Raises InvalidRequest if they are not of the type, or the lists of different lengths."""
    widths = {len(row) for row in rows}
    if len(widths) != 1 or 0 in widths:
        lengths = ", ".join(map(str, sorted(widths)[:4])) or "no"
        raise InvalidRequest(f"`{field}` has vectors of {lengths} numbers: send at least one, all equally long", param=field)
    array = np.array(rows, np.float64)
    if dtype == "float32":
        _check_size(array, field)
        return array.astype(np.float32)
    low, high = (-128, 127) if dtype in ("int8", "binary") else (0, 255)
    if not ((array == np.rint(array)) & (array >= low) & (array <= high)).all():
        raise InvalidRequest(f"`{field}` must have whole numbers from {low} to {high}, since its type is {dtype}", param=field)
    numbers: NDArray[Any] = (array + (128 if dtype == "binary" else 0)).astype(np.int8 if dtype == "int8" else np.uint8)
    return numbers


def _check(matrix: Matrix, width: int | None, field: str, model: Model) -> None:
    if matrix.width != width:
        raise InvalidRequest(
            f"`{field}` has {matrix.width} numbers for a vector, and model {model.name} gives {width}: send vectors of this model",
            param=field,
        )
    if matrix.dtype in ("float16", "float32"):
        _check_size(matrix.numbers, field)


def _check_size(numbers: NDArray[Any], field: str) -> None:
    if not (np.abs(numbers) <= _LARGEST).all():  # nor is it for NaN
        raise InvalidRequest(f"`{field}` has a number that is not finite, or larger than {_LARGEST:.0f}: send others", param=field)
