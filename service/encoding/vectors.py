"""Converts a vector to the form in which it is sent: truncated to fewer dimensions, renormalised, then written as floats, bytes or bits.

The bit formats are those of sentence-transformers. Its int8 and uint8 formats need calibration, so here each vector is scaled by its own
largest component instead. Cosines between such vectors differ from cosines between the float vectors by at most about
1e-3.
"""

import base64
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from service.errors import InvalidRequest, RuntimeFailed
from service.runtime.onnx import Array

Form = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


def cut(row: Array, dimensions: int | None, *, normalize: bool) -> Array:
    """Return the first `dimensions` numbers of a (D,) vector, scaled to length 1 if `normalize`."""
    if dimensions is None or dimensions == len(row):
        return row
    part = row[:dimensions]
    length = float(np.linalg.norm(part))
    if length == 0:
        raise RuntimeFailed(f"the first {dimensions} dimensions of this vector are all zero, so it was withheld: request more dimensions")
    return part / np.float32(length) if normalize else part


def check_dimensions(dimensions: int | None, width: int, param: str = "dimensions") -> None:
    if dimensions is not None and not 1 <= dimensions <= width:
        raise InvalidRequest(f"`{param}` must be between 1 and {width}, the width of this model. Given: {dimensions}", param=param)


def check_bits(form: Form, dimensions: int) -> None:
    if form in ("binary", "ubinary") and dimensions % 8:
        raise InvalidRequest(f"{form} packs 8 dimensions in a byte, but {dimensions} is not a multiple of 8", param="dimensions")


def _int8(row: Array) -> Array:
    scaled: Array = np.rint(row * (127.0 / max(float(np.abs(row).max()), 1e-12)))
    return scaled


# Approximate number of bytes that a number takes in JSON, by format.
NUMBER_BYTES: dict[Form, float] = {"float": 12, "base64": 16 / 3, "int8": 5, "uint8": 4, "binary": 5 / 8, "ubinary": 4 / 8}

# orjson serialises the arrays without converting them to lists.
FORMS: dict[Form, Callable[[Array], Any]] = {
    "float": lambda row: row,
    "base64": lambda row: base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode(),
    "int8": lambda row: _int8(row).astype(np.int8),
    "uint8": lambda row: (_int8(row) + 128).astype(np.uint8),
    "binary": lambda row: (np.packbits(row > 0).astype(np.int16) - 128).astype(np.int8),
    "ubinary": lambda row: np.packbits(row > 0),
}
