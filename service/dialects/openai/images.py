"""The route `/v1/images/generations` of OpenAI, for decoders whose tokens are pixels.

Source: the OpenAI API reference (CreateImageRequest, its streaming events) and the types of openai-python. A picture is a
completion of `width * height` tokens, which are limited to grey levels, and is returned as a PNG. Additions to
OpenAI's fields: the sampling fields of `DrawingFields`. With the same `seed`, a request returns the same picture.
"""

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter
from PIL import Image
from PIL.Image import Resampling
from pydantic import BaseModel, Field, StrictBool, StrictInt

from export import contract
from service.catalog import Catalog
from service.dialects.openai.embeddings import ERRORS, render
from service.dialects.text.answer import unix_time
from service.dialects.text.request import TextCall
from service.dialects.text.schemas import STREAM, DrawingFields, Ignored, SamplingFields
from service.errors import DeadlineExceeded, InvalidRequest, ServiceError, WrongKind
from service.generation.model import Generator
from service.generation.request import Delta
from service.generation.runs import Runs
from service.http import sse
from service.http.fields import EMPTY, unsupported_fields
from service.http.routing import CallDep, CatalogDep, JsonRoute

MOST_SIDE = 1024  # maximum side of an enlarged picture, in pixels


class ImageRequest(DrawingFields):
    unsupported = unsupported_fields(
        "style frame_duration_ms complexity svg input_fidelity",
        moderation=(EMPTY, "auto", "low"),
        output_compression=(EMPTY, 100),
        frame_count=(EMPTY, 1),
    )

    model: str | None = Field(None, max_length=256, description="Name or alias of a served model; the first that draws without it.")
    prompt: str = Field(min_length=1, max_length=32_000, description="One of what the model draws; a refusal names all of them.")
    n: StrictInt = Field(1, ge=1, le=10, description="Pictures.")
    size: str = Field("auto", max_length=16, description="auto: as drawn. Or a whole multiple of that, `280x280`, each pixel a square.")
    response_format: Literal["b64_json", "url"] = Field("b64_json", description="url is refused: nothing is stored here.")
    output_format: Literal["png"] = "png"
    background: Literal["auto", "opaque"] = Field("auto", description="Always opaque here.")
    quality: Literal["auto"] = "auto"
    stream: StrictBool = False
    partial_images: StrictInt = Field(0, ge=0, le=3, description="Of a stream: unfinished pictures on the way, black where not yet drawn.")
    user: Ignored = None
    safety_identifier: Ignored = None


class ImageObject(BaseModel):
    b64_json: str = Field(description="A PNG of 8-bit grey.")


class ImageInputDetails(BaseModel):
    text_tokens: int
    image_tokens: int


class ImageUsage(BaseModel):
    """The token counts of a request. A prompt counts once, even for several pictures. Each pixel counts as a token."""

    input_tokens: int
    input_tokens_details: ImageInputDetails
    output_tokens: int
    output_tokens_details: ImageInputDetails
    total_tokens: int


class Images(BaseModel):
    created: int
    background: Literal["opaque"]
    output_format: Literal["png"]
    size: str
    data: list[ImageObject]
    usage: ImageUsage


router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/images/generations", response_model=Images, responses=STREAM)
async def generations(body: ImageRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return n pictures for the prompt. With `stream`, return one picture, after the partial pictures that are requested."""
    model, image = _that_draws(catalog, body.model)
    _check(body, image)
    sheet = Sheet.of(image, body.size)
    text = TextCall(model, call, catalog)
    requests = text.requests(
        _sampling(body, image),
        [await text.text(body.prompt)],
        n=body.n,
        max_tokens=sheet.n_pixels,
        max_tokens_field="size",
        grammar=None,
    )
    runs = await text.submit(requests, n=body.n, prompt_field="prompt", stream=body.stream)
    if body.stream:
        return await sse.stream(runs, _ImageStream(sheet, runs, body.partial_images), call, catalog.settings)
    drawn = [delta.token_ids for delta in await runs.all()]
    for token_ids in drawn:
        sheet.check(token_ids)
    pictures = await asyncio.to_thread(lambda: [sheet.base64(token_ids) for token_ids in drawn])
    return {
        "created": unix_time(),
        "background": "opaque",
        "output_format": "png",
        "size": sheet.size,
        "data": [{"b64_json": picture} for picture in pictures],
        "usage": _usage(runs),
    }


def _that_draws(catalog: Catalog, name: str | None) -> tuple[Generator, contract.Image]:
    """Return the decoder `name` and the properties of its pictures. Without a name, return the first decoder that draws pictures."""
    if not name:
        name = next((model.name for model in catalog.models.values() if _image(model.manifest) is not None), None)
    model = catalog.generator(name)
    image = _image(model.manifest)
    if image is None:
        raise WrongKind(f"model {model.name} writes text and draws no pictures: send the prompt to /v1/completions", param="model")
    return model, image


def _image(manifest: contract.Manifest) -> contract.Image | None:
    return None if manifest.decoder is None else manifest.decoder.image


def _check(body: ImageRequest, image: contract.Image) -> None:
    """Raise InvalidRequest if the fields violate a constraint that a schema cannot express."""
    if body.response_format == "url":
        raise InvalidRequest("response_format=url is not supported: nothing is stored here; send b64_json", param="response_format")
    if body.prompt not in image.prompts:
        known = ", ".join(image.prompts)
        raise InvalidRequest(f"prompt={body.prompt[:80]!r} is not among what this model draws: {known}", param="prompt")
    if body.partial_images and not body.stream:
        raise InvalidRequest("partial_images needs stream=true", param="partial_images")
    if body.stream and body.n > 1:
        raise InvalidRequest(f"n={body.n} cannot be streamed, for events do not say whose they are: send n=1", param="n")


def _sampling(body: ImageRequest, image: contract.Image) -> SamplingFields:
    """Return sampling fields that allow only the tokens of grey levels, and that ignore the end token."""
    given = {name: getattr(body, name) for name in DrawingFields.model_fields}
    return SamplingFields(**given, allowed_token_ids=list(image.level_token_ids), ignore_eos=True)


@dataclass(frozen=True)
class Sheet:
    """The format of the returned pictures: each pixel that the model draws is enlarged to a square."""

    image: contract.Image
    enlarged: int  # side, in returned pixels, of the square that one pixel of the model becomes

    @classmethod
    def of(cls, image: contract.Image, size: str) -> "Sheet":
        """Return the format for `size`. Raises InvalidRequest unless `size` is "auto" or a whole multiple of the model's own size."""
        most = max(1, MOST_SIDE // max(image.width, image.height))
        for enlarged in range(1, most + 1):
            sheet = cls(image, enlarged)
            if size in (sheet.size, "auto"):
                return sheet
        raise InvalidRequest(
            f"size={size!r} is not a whole multiple of {image.width}x{image.height}, which this model draws: "
            f"send auto or up to {cls(image, most).size}",
            param="size",
        )

    @property
    def n_pixels(self) -> int:
        return self.image.width * self.image.height

    @property
    def size(self) -> str:
        return f"{self.image.width * self.enlarged}x{self.image.height * self.enlarged}"

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise DeadlineExceeded if pixels are missing: a run ends early only at its deadline."""
        if len(token_ids) < self.n_pixels:
            raise DeadlineExceeded(f"the request's deadline passed after {len(token_ids)} of the picture's {self.n_pixels} pixels")

    def base64(self, token_ids: Sequence[int]) -> str:
        """Return a PNG of the pixels generated so far, in base64."""
        ids = self.image.level_token_ids
        levels = [ids.index(token_id) for token_id in token_ids]
        file = png(levels, width=self.image.width, height=self.image.height, n_levels=len(ids), enlarged=self.enlarged)
        return b64encode(file).decode()


def _usage(runs: Runs) -> dict[str, Any]:
    prompt, drawn = runs.prompt_tokens, runs.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"text_tokens": prompt, "image_tokens": 0},
        "output_tokens": drawn,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": drawn},
        "total_tokens": prompt + drawn,
    }


class _ImageStream(sse.Script[tuple[int, Delta]]):
    """Builds the events of one picture: partial pictures at equal intervals of pixels, then the whole picture."""

    def __init__(self, sheet: Sheet, runs: Runs, partial_images: int) -> None:
        self._sheet, self._runs = sheet, runs
        self._drawn: list[int] = []
        self._stops = [sheet.n_pixels * (at + 1) // (partial_images + 1) for at in range(partial_images)]
        self._shown = 0  # number of partial pictures sent so far
        self._created = unix_time()

    def pieces(self, pieces: Sequence[tuple[int, Delta]]) -> bytes:
        for _, delta in pieces:
            self._drawn += delta.token_ids
        events = b""
        while self._shown < len(self._stops) and self._stops[self._shown] <= len(self._drawn):
            unfinished = self._drawn[: self._stops[self._shown]]
            events += self._event("image_generation.partial_image", unfinished, partial_image_index=self._shown)
            self._shown += 1
        return events

    def closing(self) -> bytes:
        self._sheet.check(self._drawn)
        return self._event("image_generation.completed", self._drawn, usage=_usage(self._runs))

    def failure(self, error: ServiceError) -> bytes:
        return sse.event({"type": "error", **render(error)[1]}, "error")

    def _event(self, kind: str, token_ids: Sequence[int], **content: Any) -> bytes:
        picture = {"b64_json": self._sheet.base64(token_ids), "created_at": self._created, "size": self._sheet.size}
        return sse.event({"type": kind, **picture, "quality": "auto", "background": "opaque", "output_format": "png", **content}, kind)


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
