"""Grey levels as PNG: what is written is what any reader sees."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from service.dialects.openai.images import png


def read(file: bytes) -> np.ndarray:
    picture = Image.open(BytesIO(file))
    assert (picture.format, picture.mode) == ("PNG", "L")
    return np.asarray(picture)


def test_levels_go_from_black_to_white_row_by_row() -> None:
    assert read(png([0, 1, 2, 3, 0, 3], width=3, height=2, n_levels=4)).tolist() == [[0, 85, 170], [255, 0, 255]]


@pytest.mark.parametrize("n_levels", [2, 16, 256])
def test_every_level_has_its_own_grey(n_levels: int) -> None:
    greys = read(png(range(n_levels), width=n_levels, height=1, n_levels=n_levels))[0].tolist()
    assert (greys[0], greys[-1]) == (0, 255)
    assert greys == sorted(set(greys))
