"""The Jina dialect: `/v1/rerank`, and `POST /rerank` for a body with `documents`. Version 1 of Cohere's API has a similar route.

Source: the Jina API reference. vLLM and infinity have similar routes too. As in Jina, a document's text is returned as {"text"} unless
`return_documents` is false. infinity returns the text alone, so `POST /rerank` does so for bodies with `raw_scores`, which infinity's
clients send and those of Jina and vLLM do not. As in vLLM, `top_n=0` means all documents. Additions: `raw_scores`,
`truncated`, `warnings`, and for Cohere's clients `id`, `meta` and the `message` of an error. Jina's `/v1/embeddings` is in the
OpenAI dialect.
"""

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from service.call import Call
from service.catalog import Catalog
from service.dialects.cohere import ApiVersion, search_units
from service.dialects.openai.embeddings import OpenAIUsage
from service.dialects.ranking import RerankRequest, rank
from service.dialects.text.schemas import VLLM, VLLM_IGNORED
from service.errors import ServiceError
from service.http.dialect import Dialect
from service.http.fields import EMPTY, unsupported_fields
from service.http.routing import CallDep, CatalogDep, JsonRoute
from service.tokenization.texts import Cutting


class JinaRerankRequest(RerankRequest):
    ignored = VLLM_IGNORED | {"additional_data", "user"}
    unsupported = unsupported_fields(
        VLLM,
        RerankRequest.unsupported,
        "cache_salt truncate_prompt_tokens max_doc_length max_query_length return_embeddings chat_template chat_template_kwargs",
        truncate=(True,),
        truncation=(True,),
        use_activation=(True,),
        activation=(True,),
        max_tokens_per_doc=(EMPTY, 4096),
    )

    return_documents: bool = Field(True, description="False leaves the texts out of the answer.")


class DocumentText(BaseModel):
    text: str


class JinaRerankResult(BaseModel):
    index: int
    relevance_score: float
    document: DocumentText | str | None = Field(
        None,
        description="Missing for vectors without a text, and where `return_documents` is false. The text alone at /rerank for a body with "
        "`raw_scores`.",
    )


class JinaBilledUnits(BaseModel):
    search_units: int


class JinaMeta(BaseModel):
    api_version: ApiVersion
    billed_units: JinaBilledUnits


class JinaRerankResponse(BaseModel):
    model: str
    object: Literal["list"]
    usage: OpenAIUsage
    results: list[JinaRerankResult]
    truncated: list[Cutting] = Field(
        description="The documents that were cut, with their tokens (the query's included) before (at least) and after."
    )
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
    """Return the documents ordered by relevance, best first. The answer has Jina's fields and those of Cohere's version 1."""
    return await answer(body, call, catalog, [None if text is None else {"text": text} for text in body.texts])


async def answer(body: JinaRerankRequest, call: Call, catalog: Catalog, shown: Sequence[Any]) -> dict[str, Any]:
    """Return the answer. `shown`: the documents in the form in which it has them, None for vectors without a text."""
    ranking = await rank(body, call, catalog)
    return {
        "model": ranking.model.name,
        "object": "list",
        "usage": {"total_tokens": ranking.n_tokens, "prompt_tokens": ranking.n_tokens},
        "results": [
            {
                "index": one.index,
                "relevance_score": one.score,
                **({"document": shown[one.index]} if body.return_documents and shown[one.index] is not None else {}),
            }
            for one in ranking.results
        ],
        "truncated": ranking.truncated,
        "warnings": ranking.warnings,
        "id": call.request_id,
        "meta": {"api_version": {"version": "1"}, "billed_units": {"search_units": search_units(body.documents)}},
    }
