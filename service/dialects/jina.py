"""Jina: `/v1/rerank`, and `POST /rerank` where a body has `documents`. Cohere's version 1 has the same path and nearly the same body.

Source: the Jina API reference; vLLM and infinity serve the same path in nearly the same words. As in Jina, and unlike infinity, the text of
a document comes back as {"text"}, and it does unless `return_documents` is false. As in vLLM, `top_n` of 0 means all. Beyond it:
`raw_scores`, `truncated`, `warnings`; and `id` and `meta`, which Cohere's clients read, as they read `message` of an error. Vectors at
`/v1/embeddings` are the OpenAI dialect's.
"""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from service.dialects import accepted
from service.dialects.cohere import ApiVersion, DocumentText, search_units
from service.dialects.ranking import rank
from service.errors import ServiceError
from service.http.dialect import Dialect
from service.http.fields import Body
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many
from service.tokenization.texts import Cutting


class GivenDocument(Body):
    text: str


class JinaRerankRequest(Body):
    """Unlisted fields are ignored; "7" and true are not numbers."""

    model_config = ConfigDict(strict=True)

    others = accepted.JINA

    model: str | None = Field(
        None, max_length=256, description="Name or alias of a served reranker, or of an encoder, whose cosines then stand in."
    )
    query: str = Field(min_length=1, description="What the documents are compared with.")
    documents: Many[str | GivenDocument] = Field(min_length=1, description="The documents to put in order.")
    top_n: int | None = Field(None, ge=0, lt=2**31, description="Answer with the best so many; all without it, or with 0.")
    return_documents: bool = Field(True, description="False leaves the texts out of the answer.")
    raw_scores: bool = Field(False, description="Logits (of an encoder: cosines) in place of scores in [0, 1].")


class JinaRerankResult(BaseModel):
    index: int
    relevance_score: float
    document: DocumentText | None = Field(None, description="Missing where `return_documents` is false.")


class JinaUsage(BaseModel):
    total_tokens: int
    prompt_tokens: int


class JinaBilledUnits(BaseModel):
    search_units: int


class JinaMeta(BaseModel):
    api_version: ApiVersion
    billed_units: JinaBilledUnits


class JinaRerankResponse(BaseModel):
    model: str
    object: Literal["list"]
    usage: JinaUsage
    results: list[JinaRerankResult]
    truncated: list[Cutting] = Field(description="The documents that were cut, with their tokens (the query's included) before and after.")
    warnings: list[str]
    id: str
    meta: JinaMeta


class JinaErrorResponse(BaseModel):
    detail: str
    message: str = Field(description="The same, where Cohere's clients look for it.")


def render(error: ServiceError) -> tuple[int, Any]:
    return 422 if error.status == 424 else error.status, {"detail": error.message, "message": error.message}


DIALECT = Dialect("jina", ("/v1/rerank",), render)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": JinaErrorResponse} for status in (400, 401, 404, 413, 422, 429, 500, 503, 504)}
router = APIRouter(route_class=JsonRoute, tags=["Jina"], responses=ERRORS)


@router.post("/v1/rerank", response_model=JinaRerankResponse)
async def rerank(body: JinaRerankRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """The documents by relevance to the query, best first; in Jina's form and in Cohere's of version 1."""
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    ranking = await rank(catalog, call, body.model, body.query, documents, top_n=body.top_n or None)
    return {
        "model": ranking.model.name,
        "object": "list",
        "usage": {"total_tokens": ranking.n_tokens, "prompt_tokens": ranking.n_tokens},
        "results": [
            {
                "index": one.index,
                "relevance_score": one.raw if body.raw_scores else one.score,
                **({"document": {"text": documents[one.index]}} if body.return_documents else {}),
            }
            for one in ranking.results
        ],
        "truncated": ranking.truncated,
        "warnings": ranking.warnings,
        "id": call.request_id,
        "meta": {"api_version": {"version": "1"}, "billed_units": {"search_units": search_units(documents)}},
    }
