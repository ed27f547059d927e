"""Writes training pictures as text.

scikit-learn has 1,797 handwritten digits (8x8 pixels, grey levels 0 to 16). They become pictures of 28x28 pixels in 16 levels.
Each picture is a document: first the digit that it shows, then a letter for each pixel, row by row from the upper left, from `a` (black)
to `p` (white). If each byte is one token, a decoder learns these documents like any text, as in the experiment of Katharopoulos et al.
2020, section 4.2. A tenth of the originals is held out. Each other original is used unchanged and in slightly shifted, rotated and
zoomed variants.
"""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from PIL import Image
from PIL.Image import Resampling, Transform
from rich.console import Console
from sklearn.datasets import load_digits

from models.training.corpus import TextDocument, write_texts

SIDE = 28  # width and height of a picture in pixels, as in MNIST
LETTERS = "abcdefghijklmnop"  # the letter of each grey level, black first
SCALE = 3.0  # picture pixels per original pixel: 8 x 3 = 24 of 28, so that a margin of 2 is left
BORDER = 2  # black pixels added around the original, so that its edge is interpolated like its inside
BRIGHTEST = 16  # highest grey level of the originals
VARIANTS = 15  # pictures made from each training original; the first is not shifted, rotated or zoomed
SHIFT, TURN, ZOOM = 2.0, 8.0, 0.08  # largest changes in a variant: pixels, degrees, share of the size
HELD_OUT = 0.1  # share of the originals that are held out


def pictures() -> dict[str, list[TextDocument]]:
    """Return the documents of both splits. A document's package is its digit, so the evaluation reports each digit separately."""
    originals, digits = load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    order = random.permutation(len(originals))
    n_held_out = round(HELD_OUT * len(originals))
    held_out = [_document(i, 0, digits[i], _enlarged(originals[i])) for i in order[:n_held_out]]
    train = [
        _document(i, variant, digits[i], picture)
        for i in order[n_held_out:]
        for variant, picture in enumerate(_variants(originals[i], random))
    ]
    return {"train": train, "held_out": held_out}


def _variants(original: np.ndarray, random: Generator) -> Iterator[np.ndarray]:
    yield _enlarged(original)
    for _ in range(VARIANTS - 1):
        right, down = random.uniform(-SHIFT, SHIFT, 2)
        yield _enlarged(original, right=right, down=down, turn=random.uniform(-TURN, TURN), zoom=1 + random.uniform(-ZOOM, ZOOM))


def _enlarged(original: np.ndarray, *, right: float = 0.0, down: float = 0.0, turn: float = 0.0, zoom: float = 1.0) -> np.ndarray:
    """Enlarge an original (64,) to a picture of grey levels 0 to 15, (28 * 28,) int. `right` and `down` move it by pixels of the picture,
    `turn` rotates it by degrees, and `zoom` multiplies its size.
    """
    canvas = np.pad(original.reshape(8, 8).astype(np.float32), BORDER)
    cos, sin = np.cos(np.radians(turn)) / (SCALE * zoom), np.sin(np.radians(turn)) / (SCALE * zoom)
    x, y, centre = SIDE / 2 + right, SIDE / 2 + down, len(canvas) / 2  # the canvas centre is mapped to (x, y)
    back = (cos, sin, centre - cos * x - sin * y, -sin, cos, centre + sin * x - cos * y)
    picture = np.asarray(Image.fromarray(canvas).transform((SIDE, SIDE), Transform.AFFINE, back, Resampling.BICUBIC))
    return np.rint(picture.clip(0, BRIGHTEST) * ((len(LETTERS) - 1) / BRIGHTEST)).astype(int).ravel()


def _document(original: int, variant: int, digit: int, picture: np.ndarray) -> TextDocument:
    text = f"{digit}{''.join(LETTERS[level] for level in picture)}"
    return TextDocument(package=f"digit {digit}", file=f"{original}-{variant}", text=text)


def sources(splits: dict[str, list[TextDocument]]) -> dict[str, Any]:
    """Return the content of sources.json. Its key `image` marks the data as pictures (see `models.training.corpus`)."""
    return {
        "image": {"width": SIDE, "height": SIDE, "letters": LETTERS, "prompts": [str(digit) for digit in range(10)]},
        "packages": [{"name": "scikit-learn", "version": version("scikit-learn"), "licence": "BSD-3-Clause"}],
        "data_set": {
            "name": "Optical Recognition of Handwritten Digits",
            "authors": "E. Alpaydin, C. Kaynak (1998)",
            "url": "https://archive.ics.uci.edu/dataset/80",
            "licence": "CC BY 4.0",
        },
        "made": f"8x8 pixels enlarged {SCALE:g} times (bicubic) on {SIDE}x{SIDE}, cut to {len(LETTERS)} grey levels; each training picture "
        f"once straight and {VARIANTS - 1} times moved by up to {SHIFT:g} pixels, turned by up to {TURN:g} degrees and zoomed by up to "
        f"{100 * ZOOM:g} %",
        "totals": {
            split: {"bytes": sum(document.size_bytes for document in documents), "files": len(documents)}
            for split, documents in splits.items()
        },
    }


def write_digits(out: Path) -> None:
    """Write the pictures to the data folder `out`."""
    splits = pictures()
    write_texts(out, splits, sources(splits))
    counts = ", ".join(f"{len(documents):,} {split.replace('_', ' ')}" for split, documents in splits.items())
    Console(stderr=True).print(f"{out}: pictures of {SIDE}x{SIDE} pixels, {counts}")
