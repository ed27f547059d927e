"""The forms of a vector, each against the formula it stands for."""

import base64

import numpy as np
import pytest

from service.encoding.vectors import FORMS, check_bits, check_dimensions, cut
from service.errors import InvalidRequest, RuntimeFailed
from service.runtime.onnx import Array

# Rounding to 1/127 of the largest component moves a vector of 384 normal components by less than 1% of its length, and across, not along.
INT8_COSINE_ERROR = 1e-3


def units(count: int, width: int = 384, seed: int = 0) -> Array:
    rows = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    unit: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_base64_is_little_endian_float32_without_a_header() -> None:
    (row,) = units(1)
    assert np.array_equal(np.frombuffer(base64.b64decode(FORMS["base64"](row)), "<f4"), row)


def test_binary_and_ubinary_are_those_of_sentence_transformers() -> None:
    """`quantize_embeddings`: packbits(x > 0), less 128 for the signed form."""
    for row in units(20):
        bits = np.packbits(row > 0)
        assert FORMS["ubinary"](row).dtype == np.uint8
        assert FORMS["binary"](row).dtype == np.int8
        assert np.array_equal(FORMS["ubinary"](row), bits)
        assert np.array_equal(FORMS["binary"](row), (bits.astype(int) - 128).astype(np.int8))


def test_int8_fills_its_range_and_keeps_every_cosine() -> None:
    rows = units(40)
    small = [FORMS["int8"](row) for row in rows]
    assert all(row.dtype == np.int8 and np.abs(row.astype(int)).max() == 127 for row in small)
    for a in range(0, 40, 2):
        assert cosine(small[a], rows[a]) > 1 - INT8_COSINE_ERROR
        assert cosine(small[a], small[a + 1]) == pytest.approx(cosine(rows[a], rows[a + 1]), abs=INT8_COSINE_ERROR)


@pytest.mark.parametrize("form", ["int8", "uint8"])
def test_a_row_of_zeros_has_a_small_form_too(form: str) -> None:
    FORMS[form](np.zeros(8, np.float32))  # type: ignore[index]


def test_dimensions_are_cut_first_and_the_rest_is_brought_back_to_length_1() -> None:
    for row in units(5):
        part = cut(row, 64, normalize=True)
        assert part.dtype == np.float32
        assert np.linalg.norm(part) == pytest.approx(1, abs=1e-6)
        assert np.allclose(part, row[:64] / np.linalg.norm(row[:64]), atol=1e-7)


@pytest.mark.parametrize("dimensions", [None, 384])
def test_all_dimensions_are_the_row_untouched(dimensions: int | None) -> None:
    (row,) = units(1)
    assert cut(row, dimensions, normalize=True) is row


def test_a_cut_never_writes_to_the_row_which_the_cache_may_hold() -> None:
    (row,) = units(1)
    row.setflags(write=False)
    for dimensions in (None, 8, 384):
        for normalize in (True, False):
            for form in FORMS.values():
                form(cut(row, dimensions, normalize=normalize))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_part_without_length_is_withheld(normalize: bool) -> None:
    with pytest.raises(RuntimeFailed, match="first 4 dimensions"):
        cut(np.array([0, 0, 0, 0, 1], np.float32), 4, normalize=normalize)


@pytest.mark.parametrize("dimensions", [0, -1, 385])
def test_dimensions_outside_the_width_are_refused(dimensions: int) -> None:
    with pytest.raises(InvalidRequest, match=f"between 1 and 384, the width of this model. Given: {dimensions}"):
        check_dimensions(dimensions, 384)


def test_bits_need_whole_bytes() -> None:
    check_bits("binary", 64)
    check_bits("float", 63)
    with pytest.raises(InvalidRequest, match="63 is not a multiple of 8"):
        check_bits("ubinary", 63)
