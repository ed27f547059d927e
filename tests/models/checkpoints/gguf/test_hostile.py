"""A GGUF file that is broken or hostile is refused in one sentence, before memory is taken for it."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType

from models.checkpoints.gguf.header import check_header
from models.checkpoints.gguf.unpack import unpack
from models.folders.folder import CheckpointError
from tests.models.checkpoints.gguf.tiny import tiny_gguf

HUGE = 2**62
MiB = 2**20


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf(tmp_path_factory.mktemp("good") / "tiny.gguf").read_bytes()


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(fields: list[bytes], tensors: list[bytes], data: bytes = bytes(256), *, version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


STRING, ARRAY, U32, F32 = (int(GGUFValueType[name]) for name in ("STRING", "ARRAY", "UINT32", "FLOAT32"))
LONG = field(b"long", ARRAY, struct.pack("<IQ", 0, 600_000) + bytes(600_000))
HOSTILE = {
    "empty": (b"", "does not begin with GGUF"),
    "another format": (b"PK\x03\x04" + bytes(100), "does not begin with GGUF"),
    "cut in the counts": (b"GGUF" + struct.pack("<IQ", 3, 1), "ends inside the number of fields"),
    "another version": (file_of([], [], version=1), "the version is 1; supported are 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "little-endian"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), f"has {HUGE} tensors; the limit is"),
    "many fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), f"has {HUGE} fields; the limit is"),
    "a long name": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE), f"has {HUGE} bytes in the name of a field"),
    "a long text": (file_of([field(b"a", STRING, struct.pack("<Q", HUGE))], []), f"has {HUGE} bytes in a text of a; the limit is"),
    "a text beyond the end": (file_of([field(b"a", STRING, struct.pack("<Q", 9999))], []), "ends inside a"),
    "a long array": (file_of([field(b"a", ARRAY, struct.pack("<IQ", F32, HUGE))], []), f"has {HUGE} elements of arrays; the limit is"),
    "an array beyond the end": (file_of([field(b"a", ARRAY, struct.pack("<IQ", F32, 10**6))], []), "ends inside a"),
    "arrays that are long together": (file_of([LONG, LONG.replace(b"long", b"more")], []), "elements of arrays"),
    "an array of arrays": (file_of([field(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1))], []), "a is an array of arrays"),
    "an unknown type of a value": (file_of([field(b"a", 77, b"")], []), "'a' has a value of the unknown type 77"),
    "a name that is no text": (file_of([field(b"\xff", U32, bytes(4))], []), "is not UTF-8"),
    "a field twice": (file_of([field(b"a", U32, bytes(4))] * 2, []), "two fields have the name 'a'"),
    "a tensor twice": (file_of([], [tensor(b"t", (8,)), tensor(b"t", (8,), offset=32)]), "two tensors have the name 't'"),
    "an alignment of 3": (file_of([field(b"general.alignment", U32, struct.pack("<I", 3))], []), "general.alignment=3 is not a power of 2"),
    "an alignment of 0": (file_of([field(b"general.alignment", U32, bytes(4))], []), "general.alignment=0 is not a power of 2"),
    "an alignment that is a text": (file_of([field(b"general.alignment", STRING, text(b"8"))], []), "has the type STRING, not UINT32"),
    "no axes": (file_of([], [tensor(b"t", ())]), "'t' has 0 axes"),
    "many axes": (file_of([], [text(b"t") + struct.pack("<I", 2**31)]), f"'t' has {2**31} axes"),
    "a size of 0": (file_of([], [tensor(b"t", (0, 4))]), r"has the shape \[0, 4\]"),
    "an unknown type of a tensor": (file_of([], [tensor(b"t", (8,), kind=99)]), "has the type 99; supported are F32"),
    "a type that is not supported": (file_of([], [tensor(b"t", (256,), kind=10)]), "has the type Q2_K; supported are F32"),
    "a row that is no whole block": (file_of([], [tensor(b"t", (33, 2), kind=8)]), "Q8_0 has blocks of 32"),
    "a size whose product overflows": (file_of([], [tensor(b"t", (2**32, 2**32))]), "ends at byte"),
    "an offset beyond the end": (file_of([], [tensor(b"t", (8,), offset=2**40)]), "ends at byte"),
    "an offset that overflows": (file_of([], [tensor(b"t", (8,), offset=2**64 - 32)]), "ends at byte"),
    "an odd offset": (file_of([], [tensor(b"t", (8,), offset=4)]), "begins at 4, which is not a multiple of 32"),
    "tensors that overlap": (file_of([], [tensor(b"t", (32,)), tensor(b"u", (8,), offset=64)]), "'u' begins at 64, inside 't'"),
    "a tensor that is cut": (file_of([], [tensor(b"t", (65,))]), "ends at byte"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_claims_more_than_it_has_is_refused(name: str, tmp_path: Path) -> None:
    content, said = HOSTILE[name]
    file = tmp_path / "hostile.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=said) as refused:
            unpack(file, tmp_path / "folder")
        assert tracemalloc.get_traced_memory()[1] < MiB
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "folder").exists()


def test_a_file_that_is_cut_anywhere_is_refused(good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 7), *np.linspace(400, len(good) - 1, 60).astype(int)]:
        file.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            check_header(file)


def test_a_link_to_another_place_is_refused(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(good)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="link to a place outside its folder"):
        unpack(tmp_path / "folder" / "model.gguf", tmp_path / "out")


def zeros(header: bytearray, at: int) -> None:
    header[at : at + 8] = bytes(8)


def ones(header: bytearray, at: int) -> None:
    header[at : at + 8] = b"\xff" * 8


def small(header: bytearray, at: int) -> None:
    header[at] ^= 1 << (at % 8)


@pytest.mark.parametrize("change", [zeros, ones, small])
def test_no_change_of_a_header_ends_in_anything_but_a_sentence(
    change: Callable[[bytearray, int], None], good: bytes, tmp_path: Path
) -> None:
    """A change may also leave a readable file, for example with another token."""
    length = good.index(b"blk.1.ffn_up.weight")
    file = tmp_path / "changed.gguf"
    for number, at in enumerate(np.random.default_rng(0).integers(0, length, 25)):
        header = bytearray(good[:length])
        change(header, int(at))
        file.write_bytes(bytes(header) + good[length:])
        try:
            unpack(file, tmp_path / str(number))
        except CheckpointError as error:
            assert "\n" not in str(error)  # noqa: PT017
