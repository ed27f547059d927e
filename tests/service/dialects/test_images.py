"""`/v1/images/generations`, whole and streamed: by hand, and by OpenAI's own client."""

from base64 import b64decode
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from export import contract
from service.dialects.text.request import seed_of
from service.errors import RuntimeFailed
from service.generation.request import GenerationRequest
from tests.service.dialects.asking import Route, expect_refusals
from tests.service.fakes import client
from tests.service.generation_fakes import BOS, FakeGenerator, generator_app

DRAWN = "abcdabcddcba"  # 4 x 3 pixels
GREYS = [[0, 85, 170, 255], [0, 85, 170, 255], [255, 170, 85, 0]]
USAGE = {
    "input_tokens": 2,  # <s> and the digit
    "input_tokens_details": {"text_tokens": 2, "image_tokens": 0},
    "output_tokens": 12,
    "output_tokens_details": {"text_tokens": 0, "image_tokens": 12},
    "total_tokens": 14,
}


def painter(name: str = "painter") -> FakeGenerator:
    """A fake whose tokens a, b, c, d are the levels of a picture of 4 x 3."""
    model = FakeGenerator(name)
    image = contract.Image(width=4, height=3, level_token_ids=tuple(model.encode("abcd", add_special_tokens=False)), prompts=("3", "7"))
    decoder = model.manifest.decoder
    assert decoder is not None
    model.manifest = model.manifest.model_copy(update={"decoder": decoder.model_copy(update={"image": image})})
    model.engine.script = model.engine.first_script = DRAWN
    return model


def pixels(b64_json: str) -> list[list[int]]:
    picture = Image.open(BytesIO(b64decode(b64_json)))
    assert (picture.format, picture.mode) == ("PNG", "L")
    rows: list[list[int]] = np.asarray(picture).tolist()
    return rows


async def requests_of(service: Route, **fields: Any) -> list[GenerationRequest]:
    """What the engine is asked for."""
    await service.whole(**fields)
    return service.engine.requests


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(where: str) -> AsyncIterator[Route]:
    model = painter()
    app = generator_app(FakeGenerator("wordy"), model, FakeGenerator("mini", kind="encoder"), aliases={"gpt-image": "painter"})
    async with client(app) as http:
        yield Route(http, app, model, "/v1/images/generations", {"prompt": "7"})


# Answers ---------------------------------------------------------------------------------------------------------------------------------


async def test_the_answer_has_openais_form_and_the_tokens_are_the_pixels(service: Route) -> None:
    content = await service.whole()
    assert list(content) == ["created", "background", "output_format", "size", "data", "usage"]
    assert (content["background"], content["output_format"], content["size"]) == ("opaque", "png", "4x3")
    assert [pixels(picture["b64_json"]) for picture in content["data"]] == [GREYS]
    assert content["usage"] == USAGE


async def test_nothing_but_grey_levels_is_drawn_to_the_last_pixel(service: Route) -> None:
    (request,) = await requests_of(service)
    assert request.prompt == (BOS, *service.model.encode("7", add_special_tokens=False))
    assert request.sampling.allowed_token_ids == tuple(service.model.encode("abcd", add_special_tokens=False))
    assert (request.max_tokens, request.min_tokens, request.ignore_eos, request.stop, request.grammar) == (12, 0, True, (), None)


async def test_n_pictures_have_seeds_of_their_own_and_count_the_prompt_once(service: Route) -> None:
    assert [request.sampling.seed for request in await requests_of(service, n=3, seed=7)] == [seed_of(7, 0), seed_of(7, 1), seed_of(7, 2)]
    content = await service.whole(n=3)
    assert len(content["data"]) == 3
    usage = content["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (2, 36, 38)


async def test_without_a_model_the_first_that_draws_is_meant(service: Route) -> None:
    for name in ("painter", "gpt-image", None):
        await service.whole(model=name)
    assert len(service.engine.requests) == 3


async def test_a_larger_picture_is_the_same_in_squares(service: Route) -> None:
    for size, enlarged in (("auto", 1), (None, 1), ("4x3", 1), ("8x6", 2), ("1024x768", 256)):
        content = await service.whole(size=size)
        assert content["size"] == f"{4 * enlarged}x{3 * enlarged}"
        assert pixels(content["data"][0]["b64_json"]) == np.kron(GREYS, np.ones((enlarged, enlarged), int)).tolist()


# Streams ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("partial_images", "stops"), [(0, []), (1, [6]), (2, [4, 8]), (3, [3, 6, 9])])
async def test_a_stream_shows_how_far_the_picture_is(service: Route, partial_images: int, stops: list[int]) -> None:
    *partial, completed = await service.streamed(partial_images=partial_images)
    assert [event["type"] for event in partial] == ["image_generation.partial_image"] * len(stops)
    assert [event["partial_image_index"] for event in partial] == list(range(len(stops)))
    for event, stop in zip(partial, stops, strict=True):
        drawn, rest = np.ravel(pixels(event["b64_json"]))[:stop], np.ravel(pixels(event["b64_json"]))[stop:]
        assert drawn.tolist() == np.ravel(GREYS)[:stop].tolist()
        assert not rest.any(), "what is not drawn yet is black"
    assert (completed["type"], completed["usage"]) == ("image_generation.completed", USAGE)
    assert pixels(completed["b64_json"]) == GREYS
    for event in (*partial, completed):
        assert (event["size"], event["quality"], event["background"], event["output_format"]) == ("4x3", "auto", "opaque", "png")
        assert event["created_at"] == completed["created_at"]


async def test_an_error_after_the_first_picture_is_the_last_event(service: Route) -> None:
    service.engine.failures[0] = (7, RuntimeFailed("the runtime failed"))
    first, last = await service.streamed(partial_images=1)
    assert first["type"] == "image_generation.partial_image"
    assert (last["type"], last["error"]["message"], last["error"]["type"]) == ("error", "the runtime failed", "server_error")


# Refusals --------------------------------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_meant_is_refused_with_its_field(service: Route) -> None:
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": ""}, "prompt", "cannot be empty"),
        ({"prompt": None}, "prompt", "Field required"),
        ({"prompt": "a cat"}, "prompt", "prompt='a cat' is not among what this model draws: 3, 7"),
        ({"n": 11}, "n", "less than or equal to 10"),
        ({"n": 2, "stream": True}, "n", "send n=1"),
        ({"size": "5x3"}, "size", "is not a whole multiple of 4x3, which this model draws: send auto or up to 1024x768"),
        ({"size": "1028x771"}, "size", "up to 1024x768"),
        ({"size": "big"}, "size", "not a whole multiple"),
        ({"response_format": "url"}, "response_format", "nothing is stored here; send b64_json"),
        ({"output_format": "webp"}, "output_format", "'png'"),
        ({"background": "transparent"}, "background", "'opaque'"),
        ({"style": "vivid"}, "style", "is not supported"),
        ({"stop": "a"}, "stop", "not a parameter"),
        ({"partial_images": 1}, "partial_images", "needs stream=true"),
        ({"partial_images": 4, "stream": True}, "partial_images", "less than or equal to 3"),
        ({"model": "mini"}, "model", "kind encoder"),
        ({"model": "wordy"}, "model", "writes text and draws no pictures: send the prompt to /v1/completions"),
        ({"model": "nobody"}, "model", "does not exist"),
    ]
    await expect_refusals(service, rows)


async def test_where_nothing_draws_the_text_model_says_so() -> None:
    async with client(generator_app(FakeGenerator("wordy"))) as http:
        answer = await http.post("/v1/images/generations", json={"prompt": "7"})
    assert answer.status_code == 400
    assert "model wordy writes text" in answer.json()["error"]["message"]
