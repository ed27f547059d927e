"""The Cohere dialect: `/v2/embed`, `/v2/rerank` and `/v1/embed`. `/v1/rerank` is in `jina.py`, since Jina has the same path.

Source: the Cohere API reference and the requests and answers of cohere-python's ClientV2. Differences: a request may have up to
`max_client_batch` texts (2048 by default; Cohere's limit is 96), `model` is optional, `documents` may be {"text"} objects, an unknown
model gives status 404. Additions: `raw_scores`; under `meta`, the inputs that were truncated; and also under `meta`, if the request has the
header x-item-errors, the inputs that failed.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from service.call import Call
from service.catalog import Catalog
from service.dialects.input_types import as_role
from service.dialects.ranking import RerankRequest, rank
from service.encoding import vectors
from service.encoding.request import EncodeRequest
from service.errors import InvalidRequest, ServiceError
from service.http.dialect import Dialect
from service.http.fields import EMPTY, Body, unsupported_fields
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many
from service.runtime.lanes import Lane
from service.tokenization.texts import Cut, Cutting, Side

_DOCUMENTS_IN_A_SEARCH_UNIT = 100
# By Cohere's `truncate`: the side at which a long text loses tokens.
_SIDES: dict[str, Side] = {"NONE": "none", "START": "left", "END": "right"}

InputType = Literal["search_document", "search_query", "classification", "clustering", "image"]
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]
Priority = Annotated[
    int | None,
    Field(ge=0, le=999, description="0 goes to the interactive lane, more to the bulk lane; without it, and without x-lane, size decides."),
]


class TextBlock(Body):
    type: Literal["text"] = Field(description="Images are not served.")
    text: str


class MixedInput(Body):
    """An input of several text blocks, which are joined by line feeds."""

    content: Many[TextBlock] = Field(min_length=1)


class EmbedV1Request(Body, strict=True):
    """The body of `/v1/embed`. Unknown fields are ignored. Types are strict: "7" and true are not accepted as numbers.

    If the body has no `embedding_types`, the vectors in the answer are one list, not a list for each number type.
    """

    unsupported = unsupported_fields("dimensions", embedding_type=(EMPTY, "float"))

    model: str | None = Field(None, max_length=256, description="Name or alias of a served encoder. Default: the first one.")
    input_type: InputType | None = Field(None, description="Chooses the checkpoint's prompt for that role. Default: its default prompt.")
    texts: Many[str] | None = Field(None, min_length=1, description="The texts to embed.")
    images: list[Any] | None = Field(None, description="Refused: this service embeds text only.")
    embedding_types: list[vectors.Form] = Field([], max_length=16, description="One or more number types, all computed in one run.")
    truncate: Literal["NONE", "START", "END"] = Field("END", description="Which end of a long text is discarded. NONE: an error.")


class EmbedRequest(EmbedV1Request):
    input_type: InputType = Field(description="Chooses the checkpoint's prompt for that role, if it has one. Images are not supported.")
    inputs: Many[MixedInput] | None = Field(None, description="The same as `texts`, as blocks of type text.")
    max_tokens: MaxTokens | None = Field(None, description="Truncate each text to this many tokens, if the model's own limit is not lower.")
    output_dimension: int | None = Field(None, ge=1, le=65_536, description="Keep this many dimensions, then renormalise.")
    embedding_types: list[vectors.Form] = Field(["float"], max_length=16, description="One or more, all from one run; empty: float.")
    priority: Priority = None


class CohereRerankRequest(RerankRequest):
    max_tokens_per_doc: MaxTokens = Field(4096, description="Longer documents are truncated.")
    priority: Priority = None


class ApiVersion(BaseModel):
    version: str


class CohereBilledUnits(BaseModel):
    input_tokens: int | None = None
    search_units: int | None = None


class CohereTokens(BaseModel):
    input_tokens: int


class ItemError(BaseModel):
    index: int
    message: str


class CohereMeta(BaseModel):
    api_version: ApiVersion
    billed_units: CohereBilledUnits
    tokens: CohereTokens
    truncated: list[Cutting] = Field(description="The inputs that were cut, with their tokens before (of a long text: at least) and after.")
    warnings: list[str] = Field([], description="Only where there are any.")
    errors: list[ItemError] = Field([], description="Only on requests with x-item-errors: the texts whose embeddings are null, and why.")


class EmbeddingsByType(BaseModel):
    """The vectors, in each of the requested number types."""

    model_config = ConfigDict(populate_by_name=True)

    float_: list[list[float] | None] = Field([], alias="float")
    int8: list[list[int] | None] = []
    uint8: list[list[int] | None] = []
    binary: list[list[int] | None] = []
    ubinary: list[list[int] | None] = []
    base64: list[str | None] = Field([], description="Little-endian float32.")


class EmbedResponse(BaseModel):
    id: str
    embeddings: EmbeddingsByType
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]


class EmbedFloatsResponse(BaseModel):
    id: str
    embeddings: list[list[float] | None]
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_floats"]


class CohereRerankResult(BaseModel):
    index: int
    relevance_score: float


class CohereRerankResponse(BaseModel):
    id: str
    results: list[CohereRerankResult]
    meta: CohereMeta


class CohereErrorResponse(BaseModel):
    message: str


def render(error: ServiceError) -> tuple[int, Any]:
    return 400 if error.status in (422, 424) else error.status, {"message": error.message}  # Cohere answers 400 to every invalid request


DIALECT = Dialect("cohere", ("/v2/embed", "/v2/rerank", "/v1/embed"), render)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": CohereErrorResponse} for status in (400, 401, 404, 413, 429, 500, 503, 504)}
router = APIRouter(route_class=JsonRoute, tags=["Cohere"], responses=ERRORS)


@router.post("/v2/embed", response_model=EmbedResponse)
async def embed(body: EmbedRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return a vector for each text, in each of the requested number types."""
    if body.texts and body.inputs:
        raise InvalidRequest("`texts` and `inputs` cannot be combined: send one of them", param="inputs")
    _choose_lane(call, body.priority)
    texts = ["\n".join(block.text for block in each.content) for each in body.inputs] if body.inputs else body.texts
    answer, by_type = await _embed(body, texts, call, catalog, dimensions=body.output_dimension, max_tokens=body.max_tokens)
    return {**answer, "embeddings": by_type, "response_type": "embeddings_by_type"}


@router.post("/v1/embed", response_model=EmbedFloatsResponse | EmbedResponse)
async def embed_v1(body: EmbedV1Request, call: CallDep, catalog: CatalogDep) -> Any:
    """Return a vector for each text in the format of version 1: one list, or a list for each number type in `embedding_types`."""
    answer, by_type = await _embed(body, body.texts, call, catalog, version="1")
    if body.embedding_types:
        return {**answer, "embeddings": by_type, "response_type": "embeddings_by_type"}
    return {**answer, "embeddings": by_type["float"], "response_type": "embeddings_floats"}


async def _embed(
    body: EmbedV1Request,
    texts: list[str] | None,
    call: Call,
    catalog: Catalog,
    *,
    dimensions: int | None = None,
    max_tokens: int | None = None,
    version: str = "2",
) -> tuple[dict[str, Any], dict[vectors.Form, list[Any]]]:
    """Return the answer without its vectors, and the vectors by number type. The vector of a text that failed is None."""
    if body.images or body.input_type == "image":
        at_fault = "images" if body.images else "input_type"
        raise InvalidRequest("this service embeds text and no images: send `texts`, and an `input_type` other than image", param=at_fault)
    if texts is None:
        raise InvalidRequest("`texts` is missing", param="texts")
    model = catalog.get(body.model, "encoder")
    vectors.check_dimensions(dimensions, model.manifest.width, "output_dimension")
    forms: dict[vectors.Form, None] = dict.fromkeys(body.embedding_types or ["float"])
    for form in forms:
        vectors.check_bits(form, dimensions or model.manifest.width)
    queries, prompt = as_role(model, len(texts), body.input_type)
    request = EncodeRequest(
        inputs=texts,
        outputs=(model.vector_output(True),),
        cut=Cut(side=_SIDES[body.truncate], max_tokens=max_tokens),
        queries=queries,
        prompt=prompt,
        row_width=dimensions,
        number_bytes=sum(vectors.NUMBER_BYTES[form] for form in forms),
    )
    answer = await model.answer(request, call)
    rows = [None if isinstance(row, ServiceError) else vectors.cut(row[0], dimensions, normalize=True) for row in answer.rows]
    errors = [{"index": index, "message": row.message} for index, row in enumerate(answer.rows) if isinstance(row, ServiceError)]
    meta = _meta({"input_tokens": answer.n_tokens}, answer.n_tokens, answer.truncated, errors=errors, version=version)
    by_type = {form: [None if row is None else vectors.FORMS[form](row) for row in rows] for form in forms}
    return {"id": call.request_id, "texts": texts, "meta": meta}, by_type


@router.post("/v2/rerank", response_model=CohereRerankResponse)
async def rerank(body: CohereRerankRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the documents ordered by relevance to the query, best first."""
    _choose_lane(call, body.priority)
    ranking = await rank(body, call, catalog, max_document_tokens=body.max_tokens_per_doc)
    return {
        "id": call.request_id,
        "results": [{"index": one.index, "relevance_score": one.score} for one in ranking.results],
        "meta": _meta({"search_units": search_units(body.documents)}, ranking.n_tokens, ranking.truncated, warnings=ranking.warnings),
    }


def search_units(documents: Sequence[Any]) -> int:
    return math.ceil(len(documents) / _DOCUMENTS_IN_A_SEARCH_UNIT)


def _choose_lane(call: Call, priority: int | None) -> None:
    if call.lane is None and priority is not None:
        call.lane = Lane.BULK if priority else Lane.INTERACTIVE


def _meta(
    billed: dict[str, int],
    n_tokens: int,
    truncated: list[Cutting],
    *,
    warnings: Sequence[str] = (),
    errors: Sequence[dict[str, Any]] = (),
    version: str = "2",
) -> dict[str, Any]:
    if truncated:
        warnings = [*warnings, f"{len(truncated)} of the inputs were cut: meta.truncated has their tokens before and after"]
    return {
        "api_version": {"version": version},
        "billed_units": billed,
        "tokens": {"input_tokens": n_tokens},
        "truncated": truncated,
        **({"warnings": warnings} if warnings else {}),
        **({"errors": errors} if errors else {}),
    }
