"""OpenAI's client, unchanged, against the real service: pictures from the engine that writes text."""

from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import openai
import pytest
from PIL import Image

from tests.decoders import tiny_image
from tests.service.live import LiveService

pytestmark = pytest.mark.live

MODEL = "tiny-digits"
LEVELS = {letter: 85 * level for level, letter in enumerate("abcd")}


@pytest.fixture(scope="module")
def client(service: LiveService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="not needed", max_retries=0) as client:
        yield client


def pixels(b64_json: str | None) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(b64decode(b64_json or ""))))


def drawn(client: openai.OpenAI, prompt: str = "7", n: int = 1, **extra: object) -> list[np.ndarray]:
    answer = client.images.generate(model=MODEL, prompt=prompt, n=n, extra_body={"seed": 1, **extra})
    return [pixels(picture.b64_json) for picture in answer.data or ()]


def test_a_picture_is_the_completion_that_the_same_engine_writes(client: openai.OpenAI) -> None:
    """Pixel by pixel: what /v1/completions spells in the letters of the levels, /v1/images/generations draws."""
    only_levels = {"allowed_token_ids": list(tiny_image().level_token_ids), "ignore_eos": True}
    spelt = client.completions.create(model=MODEL, prompt="7", max_tokens=12, seed=1, extra_body=only_levels)
    (picture,) = drawn(client)
    assert picture.shape == (3, 4)
    assert picture.ravel().tolist() == [LEVELS[letter] for letter in spelt.choices[0].text]


def test_the_same_seed_draws_the_same_picture_and_the_prompt_matters(client: openai.OpenAI) -> None:
    first, *others = drawn(client, n=3)
    assert np.array_equal(first, drawn(client)[0])
    assert [picture.tolist() for picture in (first, *others)] == [picture.tolist() for picture in drawn(client, n=3)]
    assert len({picture.tobytes() for picture in (first, *others, *drawn(client, prompt="3"), *drawn(client, seed=2))}) == 5


def test_a_larger_picture_is_the_same_in_squares(client: openai.OpenAI) -> None:
    (small,), (large,) = drawn(client), drawn(client, size="40x30")
    assert np.array_equal(large, np.kron(small, np.ones((10, 10), np.uint8)))


def test_a_stream_shows_the_picture_on_the_way(client: openai.OpenAI) -> None:
    *partial, completed = client.images.generate(model=MODEL, prompt="7", stream=True, partial_images=2, extra_body={"seed": 1})
    whole = pixels(completed.b64_json).ravel()
    assert np.array_equal(whole, drawn(client)[0].ravel())
    assert [event.type for event in partial] == ["image_generation.partial_image"] * 2
    for event, stop in zip(partial, (4, 8), strict=True):
        assert pixels(event.b64_json).ravel().tolist() == [*whole[:stop], *[0] * (12 - stop)]
    assert completed.type == "image_generation.completed"
    assert completed.usage.output_tokens == 12


def test_a_model_that_writes_says_where_to_ask_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="send the prompt to /v1/completions") as refused:
        client.images.generate(model="tiny-decoder", prompt="7")
    assert refused.value.param == "model"
