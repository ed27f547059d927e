"""Writes grey levels as a PNG file."""

from collections.abc import Sequence
from io import BytesIO

import numpy as np
from PIL import Image
from PIL.Image import Resampling


def png(levels: Sequence[int], *, width: int, height: int, n_levels: int, enlarged: int = 1) -> bytes:
    """Return an 8-bit grey PNG of the levels, row by row from the upper left; 0 is black, `n_levels - 1` white.

    Each pixel becomes a square of `enlarged` by `enlarged` pixels. The missing pixels of an unfinished picture are black.
    """
    assert len(levels) <= width * height
    grey = np.zeros(width * height, np.uint8)
    grey[: len(levels)] = np.rint(np.array(levels, np.float64) * (255 / (n_levels - 1)))
    picture = Image.fromarray(grey.reshape(height, width))
    if enlarged > 1:
        picture = picture.resize((width * enlarged, height * enlarged), Resampling.NEAREST)
    file = BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()
