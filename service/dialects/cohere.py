"""Cohere: `/v2/embed`, `/v2/rerank` and `/v1/embed`; `/v1/rerank` is in `jina.py`, which has the path too.

Source: the Cohere API reference and what cohere-python's ClientV2 sends and reads. Different from there: as many texts in a request as the
service takes (`max_client_batch`, 2048 unless set; theirs is 96), `model` may be left out, `documents` may be {"text"} objects, an unknown
model is a 404. Beyond it: `raw_scores`, and under `meta` what was cut and, on requests with x-item-errors, which inputs failed.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from service.call import Call
from service.dialects import accepted
from service.dialects.ranking import rank, role_prompt
from service.encoding import vectors
from service.encoding.request import EncodeRequest
from service.errors import InvalidRequest, ServiceError
from service.http.dialect import Dialect
from service.http.fields import Body
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many
from service.runtime.lanes import Lane
from service.tokenization.texts import Cut, Cutting, Side

_DOCUMENTS_IN_A_SEARCH_UNIT = 100
_SIDES: dict[str, Side] = {"NONE": "none", "START": "left", "END": "right"}  # the end that is discarded

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
    """One input of several blocks, which are joined by line feeds."""

    content: Many[TextBlock] = Field(min_length=1)


class EmbedRequest(Body):
    """Unlisted fields are ignored; "7" and true are not numbers."""

    model_config = ConfigDict(strict=True)

    others = accepted.COHERE_EMBED

    model: str | None = Field(None, max_length=256, description="Name or alias of a served encoder; the first one without it.")
    input_type: InputType = Field(description="Chooses the checkpoint's prompt of that role, if it has one. Images are not served.")
    texts: Many[str] | None = Field(None, min_length=1, description="What to embed.")
    images: list[Any] | None = Field(None, description="Refused: this service embeds text.")
    inputs: Many[MixedInput] | None = Field(None, description="The same as `texts`, in blocks of type text.")
    max_tokens: MaxTokens | None = Field(None, description="Cut each text to this many tokens, if the model's own limit is not lower.")
    output_dimension: int | None = Field(None, ge=1, le=65_536, description="Keep this many dimensions, then renormalise.")
    embedding_types: list[vectors.Form] = Field(["float"], max_length=16, description="One or more, all from one run; empty: float.")
    truncate: Literal["NONE", "START", "END"] = Field("END", description="Which end of a long text is discarded; NONE makes it an error.")
    priority: Priority = None


class EmbedV1Request(Body):
    """The first version's body: without `embedding_types` the vectors are a plain list."""

    model_config = ConfigDict(strict=True)

    others = accepted.COHERE_EMBED

    model: str | None = Field(None, max_length=256, description="Name or alias of a served encoder; the first one without it.")
    input_type: InputType | None = Field(None, description="Chooses the checkpoint's prompt of that role; its default without it.")
    texts: Many[str] | None = Field(None, min_length=1, description="What to embed.")
    images: list[Any] | None = Field(None, description="Refused: this service embeds text.")
    embedding_types: list[vectors.Form] = Field([], max_length=16, description="One or more, all from one run.")
    truncate: Literal["NONE", "START", "END"] = Field("END", description="Which end of a long text is discarded; NONE makes it an error.")


class DocumentText(Body):
    text: str


class CohereRerankRequest(Body):
    """Unlisted fields are ignored; "7" and true are not numbers."""

    model_config = ConfigDict(strict=True)

    others = accepted.COHERE_RERANK

    model: str | None = Field(
        None, max_length=256, description="Name or alias of a served reranker, or of an encoder, whose cosines then stand in."
    )
    query: str = Field(min_length=1, description="What the documents are compared with.")
    documents: Many[str | DocumentText] = Field(min_length=1, description="The documents to put in order.")
    top_n: int | None = Field(None, ge=0, lt=2**31, description="Answer with the best so many; all without it, or with 0.")
    max_tokens_per_doc: MaxTokens = Field(4096, description="Longer documents are cut.")
    priority: Priority = None
    raw_scores: bool = Field(False, description="Logits (of an encoder: cosines) in place of scores in [0, 1].")


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
    truncated: list[Cutting] = Field(description="The inputs that were cut, with their tokens before and after.")
    warnings: list[str] = Field([], description="Only where there are any.")
    errors: list[ItemError] = Field([], description="Only on requests with x-item-errors: the texts whose embeddings are null, and why.")


class EmbeddingsByType(BaseModel):
    """The requested types."""

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


# Cohere answers 400 to every invalid request.
_STATUS = {422: 400, 424: 400}


def render(error: ServiceError) -> tuple[int, Any]:
    return _STATUS.get(error.status, error.status), {"message": error.message}


DIALECT = Dialect("cohere", ("/v2/embed", "/v2/rerank", "/v1/embed"), render)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": CohereErrorResponse} for status in (400, 401, 404, 413, 429, 500, 503, 504)}
router = APIRouter(route_class=JsonRoute, tags=["Cohere"], responses=ERRORS)


@router.post("/v2/embed", response_model=EmbedResponse)
async def embed(body: EmbedRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """A vector for each text, in each of the requested number types."""
    texts = _only_texts(body.texts or _joined(body.inputs), body.images, body.input_type)
    if body.texts and body.inputs:
        raise InvalidRequest("`texts` and `inputs` cannot be combined: send one of them", param="inputs")
    model = catalog.get(body.model, "encoder")
    vectors.check_dimensions(body.output_dimension, model.manifest.width, "output_dimension")
    forms: list[vectors.Form] = list(dict.fromkeys(body.embedding_types)) or ["float"]
    for form in forms:
        vectors.check_bits(form, body.output_dimension or model.manifest.width)
    _choose_lane(call, body.priority)
    request = EncodeRequest(
        inputs=texts,
        output=model.vector_output(True),
        cut=Cut(side=_SIDES[body.truncate], max_tokens=body.max_tokens),
        prompt=role_prompt(model, body.input_type),
        row_width=body.output_dimension,
        number_bytes=sum(vectors.NUMBER_BYTES[form] for form in dict.fromkeys(body.embedding_types)),
    )
    answer = await model.answer(request, call)
    rows = [None if isinstance(row, ServiceError) else vectors.cut(row, body.output_dimension, normalize=True) for row in answer.rows]
    errors = [{"index": index, "message": row.message} for index, row in enumerate(answer.rows) if isinstance(row, ServiceError)]
    return {
        "id": call.request_id,
        "embeddings": {form: [None if row is None else vectors.FORMS[form](row) for row in rows] for form in forms},
        "texts": texts,
        "meta": _meta({"input_tokens": answer.n_tokens}, answer.n_tokens, answer.truncated, errors=errors),
        "response_type": "embeddings_by_type",
    }


@router.post("/v1/embed", response_model=EmbedFloatsResponse | EmbedResponse)
async def embed_v1(body: EmbedV1Request, call: CallDep, catalog: CatalogDep) -> Any:
    """/v2/embed in the form of version 1: plain vectors, or by type if `embedding_types` names some."""
    texts = _only_texts(body.texts, body.images, body.input_type)
    model = catalog.get(body.model, "encoder")
    for form in body.embedding_types:
        vectors.check_bits(form, model.manifest.width)
    prompt = None if body.input_type is None else role_prompt(model, body.input_type)
    cut = Cut(side=_SIDES[body.truncate])
    answer = await model.answer(EncodeRequest(inputs=texts, output=model.vector_output(True), cut=cut, prompt=prompt), call)
    rows = [None if isinstance(row, ServiceError) else row for row in answer.rows]
    errors = [{"index": index, "message": row.message} for index, row in enumerate(answer.rows) if isinstance(row, ServiceError)]
    meta = _meta({"input_tokens": answer.n_tokens}, answer.n_tokens, answer.truncated, errors=errors, version="1")
    said = {"id": call.request_id, "texts": texts, "meta": meta}
    if not body.embedding_types:
        return {**said, "embeddings": rows, "response_type": "embeddings_floats"}
    forms = dict.fromkeys(body.embedding_types)
    by_type = {form: [None if row is None else vectors.FORMS[form](row) for row in rows] for form in forms}
    return {**said, "embeddings": by_type, "response_type": "embeddings_by_type"}


@router.post("/v2/rerank", response_model=CohereRerankResponse)
async def rerank(body: CohereRerankRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """The documents by relevance to the query, best first."""
    _choose_lane(call, body.priority)
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    ranking = await rank(
        catalog, call, body.model, body.query, documents, top_n=body.top_n or None, max_document_tokens=body.max_tokens_per_doc
    )
    return {
        "id": call.request_id,
        "results": [{"index": one.index, "relevance_score": one.raw if body.raw_scores else one.score} for one in ranking.results],
        "meta": _meta({"search_units": search_units(documents)}, ranking.n_tokens, ranking.truncated, warnings=ranking.warnings),
    }


def _joined(inputs: Sequence[MixedInput] | None) -> list[str] | None:
    return ["\n".join(block.text for block in each.content) for each in inputs] if inputs else None


def _only_texts(texts: list[str] | None, images: list[Any] | None, input_type: InputType | None) -> list[str]:
    if images or input_type == "image":
        at_fault = "images" if images else "input_type"
        raise InvalidRequest("this service embeds text and no images: send `texts`, and an `input_type` other than image", param=at_fault)
    if texts is None:
        raise InvalidRequest("`texts` is missing", param="texts")
    return texts


def search_units(documents: Sequence[str]) -> int:
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
