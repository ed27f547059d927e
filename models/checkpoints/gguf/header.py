"""Compares the counts, sizes and offsets in the header of a GGUF file with the file's length, before anything else reads it.

The package `gguf` trusts a file: it makes an object for every element of an array and a view for every tensor. This module keeps no
values. It follows the specification of the format (in the repository ggml-org/ggml), versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from models.folders.folder import CheckpointError, regular

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")  # types of tensors
VERSIONS = (2, 3)

# Maximum counts and sizes, far above those of published models.
MOST_FIELDS = 4096
MOST_ELEMENTS = 2**20  # of all arrays together: a vocabulary of 262,144 tokens has 786,432. The package takes 1 GB for that many
MOST_TENSORS = 2**14
MOST_NAME_BYTES = 1024
MOST_STRING_BYTES = 2**20
MOST_AXES = 4
MOST_ALIGNMENT = 2**16

_SCALARS = {
    **{GGUFValueType.UINT8: 1, GGUFValueType.INT8: 1, GGUFValueType.BOOL: 1, GGUFValueType.UINT16: 2, GGUFValueType.INT16: 2},
    **{GGUFValueType.UINT32: 4, GGUFValueType.INT32: 4, GGUFValueType.FLOAT32: 4},
    **{GGUFValueType.UINT64: 8, GGUFValueType.INT64: 8, GGUFValueType.FLOAT64: 8},
}


def check_header(file: Path) -> None:
    """Raise CheckpointError, with the reason, if the file is no GGUF file that can be read, or if it claims more than it has."""
    size = regular(file).stat().st_size
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{file} is not a GGUF file: it does not begin with GGUF; copy it again")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(file, data, size).check()


class _Header:
    """A position in the file, which is moved forward by reading."""

    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self.file, self.data, self.size = file, data, size
        self.at = 4  # after the letters GGUF
        self.elements = 0
        self.alignment = 32  # the format's default

    def check(self) -> None:
        version = self.number("<I", "the version")
        if version not in VERSIONS:
            self.refuse(f"the version is {version}; supported are {' and '.join(map(str, VERSIONS))}, little-endian")
        n_tensors = self.at_most(self.number("<Q", "the number of tensors"), MOST_TENSORS, "tensors")
        n_fields = self.at_most(self.number("<Q", "the number of fields"), MOST_FIELDS, "fields")
        self.unique((self.field() for _ in range(n_fields)), "fields")
        tensors = [self.tensor() for _ in range(n_tensors)]
        self.unique((name for name, _, _ in tensors), "tensors")
        begin = -(-self.at // self.alignment) * self.alignment
        end_before, name_before = 0, ""
        for name, offset, n_bytes in sorted(tensors, key=lambda tensor: tensor[1]):
            if offset % self.alignment:
                self.refuse(f"{name!r} begins at {offset}, which is not a multiple of {self.alignment}")
            if offset < end_before:
                self.refuse(f"{name!r} begins at {offset}, inside {name_before!r}")
            if begin + offset + n_bytes > self.size:
                self.refuse(f"{name!r} ends at byte {begin + offset + n_bytes}, and the file has {self.size}")
            end_before, name_before = offset + n_bytes, name

    def field(self) -> str:
        """Pass a field of the metadata, and return its name."""
        name = self.text(MOST_NAME_BYTES, "the name of a field")
        kind = self.kind(name)
        if name == "general.alignment":
            if kind is not GGUFValueType.UINT32:
                self.refuse(f"{name} has the type {kind.name}, not UINT32")
            self.alignment = self.number("<I", name)
            if not 1 <= self.alignment <= MOST_ALIGNMENT or self.alignment & (self.alignment - 1):
                self.refuse(f"{name}={self.alignment} is not a power of 2 up to {MOST_ALIGNMENT}")
        elif kind is not GGUFValueType.ARRAY:
            self.value(kind, name)
        else:
            kind = self.kind(name)
            if kind is GGUFValueType.ARRAY:
                self.refuse(f"{name} is an array of arrays")
            n = self.number("<Q", name)
            self.elements += n
            self.at_most(self.elements, MOST_ELEMENTS, "elements of arrays")
            if kind is GGUFValueType.STRING:
                for _ in range(n):
                    self.value(kind, name)
            else:
                self.skip(n * _SCALARS[kind], name)
        return name

    def tensor(self) -> tuple[str, int, int]:
        """Pass the description of a tensor, and return its name, offset and size in bytes."""
        name = self.text(MOST_NAME_BYTES, "the name of a tensor")
        n_axes = self.number("<I", name)
        if not 1 <= n_axes <= MOST_AXES:
            self.refuse(f"{name!r} has {n_axes} axes, not 1 to {MOST_AXES}")
        shape = [self.number("<Q", name) for _ in range(n_axes)]
        number, offset = self.number("<I", name), self.number("<Q", name)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            kind = None
        if kind is None or kind.name not in SUPPORTED:
            self.refuse(f"{name!r} has the type {number if kind is None else kind.name}; supported are {', '.join(SUPPORTED)}")
        weights, n_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[0] % weights:
            self.refuse(f"{name!r} has the shape {shape}, and {kind.name} has blocks of {weights}")
        return name, offset, prod(shape) // weights * n_bytes

    def kind(self, name: str) -> GGUFValueType:
        """Read the type of a value."""
        number = self.number("<I", name)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.refusal(f"{name!r} has a value of the unknown type {number}") from None

    def value(self, kind: GGUFValueType, name: str) -> None:
        """Pass a value that is not an array."""
        if kind is GGUFValueType.STRING:
            self.skip(self.at_most(self.number("<Q", name), MOST_STRING_BYTES, f"bytes in a text of {name}"), name)
        else:
            self.skip(_SCALARS[kind], name)

    def text(self, most: int, what: str) -> str:
        begin = self.skip(self.at_most(self.number("<Q", what), most, f"bytes in {what}"), what)
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError:
            raise self.refusal(f"{what} is not UTF-8") from None

    def number(self, form: str, what: str) -> int:
        found: int = struct.unpack_from(form, self.data, self.skip(struct.calcsize(form), what))[0]
        return found

    def skip(self, n_bytes: int, what: str) -> int:
        """Pass `n_bytes` and return where they begin."""
        begin = self.at
        if begin + n_bytes > self.size:
            self.refuse(f"it ends inside {what}")
        self.at += n_bytes
        return begin

    def at_most(self, number: int, most: int, what: str) -> int:
        if number > most:
            self.refuse(f"it has {number} {what}; the limit is {most}")
        return number

    def unique(self, names: Iterator[str], what: str) -> None:
        seen: set[str] = set()
        for name in names:
            if name in seen:
                self.refuse(f"two {what} have the name {name!r}")
            seen.add(name)

    def refuse(self, reason: str) -> NoReturn:
        raise self.refusal(reason)

    def refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.file} cannot be read: {reason[:300]}; copy it again, or use another file")
