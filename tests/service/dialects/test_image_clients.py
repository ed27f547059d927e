"""OpenAI's client, unchanged, against the real service: pictures from the engine that writes text."""

from base64 import b64decode
from io import BytesIO

import numpy as np
import openai
import pytest
from PIL import Image

from tests.decoders import tiny_image

pytestmark = pytest.mark.live

MODEL = "tiny-digits"
LEVELS = {letter: 85 * level for level, letter in enumerate("abcd")}


def pixels(b64_json: str | None) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(b64decode(b64_json or ""))))


def test_a_picture_is_the_completion_that_the_same_engine_writes(client: openai.OpenAI) -> None:
    """Pixel by pixel: what /v1/completions spells in the letters of the levels, /v1/images/generations draws."""
    only_levels = {"allowed_token_ids": list(tiny_image().level_token_ids), "ignore_eos": True}
    spelt = client.completions.create(model=MODEL, prompt="7", max_tokens=12, seed=1, extra_body=only_levels)
    (answer,) = client.images.generate(model=MODEL, prompt="7", extra_body={"seed": 1}).data or ()
    picture = pixels(answer.b64_json)
    assert picture.shape == (3, 4)
    assert picture.ravel().tolist() == [LEVELS[letter] for letter in spelt.choices[0].text]
