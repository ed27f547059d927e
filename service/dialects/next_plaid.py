"""The API of LightOn's next-plaid for token matrices: `/encode`, `/rerank_with_encoding`, and `/rerank` for a body of matrices.

Source: next-plaid-api's handlers and models. A score is MaxSim. Differences: several models are served, so a body may name one; without a
name, the first that gives token matrices answers. There are no indices here.
"""

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from service.call import Call
from service.catalog import Catalog
from service.dialects.given_vectors import Document
from service.dialects.ranking import Weights, score_pairs
from service.dialects.search_outputs import PoolFactor, pooled
from service.encoding.model import Model
from service.encoding.request import EncodeRequest
from service.encoding.token_matrix import maxsim
from service.errors import ServiceError
from service.http.dialect import Dialect
from service.http.fields import Body
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many
from service.runtime.onnx import Array
from service.runtime.steps import run_in_steps
from service.tokenization.texts import Cut


class PlaidBody(Body):
    model: str | None = Field(None, max_length=256, description="Name or alias of an encoder with token matrices; the first without it.")


class PlaidEncodeRequest(PlaidBody):
    texts: Many[str] = Field(min_length=1)
    input_type: Literal["query", "document"] = "document"
    pool_factor: PoolFactor | None = None


class PlaidDocument(Body):
    embeddings: Many[Many[float]] = Field(min_length=1, description="One vector for each token.")


class PlaidRerankRequest(PlaidBody):
    query: Many[Many[float]] = Field(min_length=1, description="One vector for each token.")
    documents: Many[PlaidDocument] = Field(min_length=1)


class PlaidRerankTextsRequest(PlaidBody):
    query: str = Field(min_length=1)
    documents: Many[str] = Field(min_length=1)
    pool_factor: PoolFactor | None = None


class PlaidEncodeResponse(BaseModel):
    embeddings: list[list[list[float]]]
    num_texts: int


class PlaidResult(BaseModel):
    index: int
    score: float


class PlaidRerankResponse(BaseModel):
    results: list[PlaidResult]
    num_documents: int


class PlaidError(BaseModel):
    code: str
    message: str


_CODES = {400: "VALIDATION_ERROR", 500: "MODEL_ERROR", 503: "MODEL_NOT_LOADED"}


def render(error: ServiceError) -> tuple[int, Any]:
    status = 400 if error.status in (422, 424) else error.status
    return status, {"code": _CODES.get(status, error.code.upper()), "message": error.message}


DIALECT = Dialect("next-plaid", ("/encode", "/rerank_with_encoding"), render)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": PlaidError} for status in (400, 401, 404, 413, 429, 500, 503, 504)}
router = APIRouter(route_class=JsonRoute, tags=["next-plaid"], responses=ERRORS)


@router.post("/encode", response_model=PlaidEncodeResponse)
async def encode(body: PlaidEncodeRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the token matrix of each text."""
    model = with_matrices(body.model, catalog)
    n_queries = len(body.texts) if body.input_type == "query" else 0
    matrices = await _matrices(model, body.texts, n_queries, body.pool_factor, call)
    return {"embeddings": [list(matrix.astype("float32")) for matrix in matrices], "num_texts": len(matrices)}


@router.post("/rerank_with_encoding", response_model=PlaidRerankResponse)
async def rerank_with_encoding(body: PlaidRerankTextsRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Order texts by MaxSim with a query, the best first."""
    model = with_matrices(body.model, catalog)
    query, *documents = await _matrices(model, [body.query, *body.documents], 1, body.pool_factor, call, sent=False)
    return _ordered(await run_in_steps(maxsim(query, document) for document in documents))


async def rerank(body: PlaidRerankRequest, call: Call, catalog: Catalog) -> dict[str, Any]:
    """Order token matrices by MaxSim with that of a query, the best first."""
    model = with_matrices(body.model, catalog)
    query, *documents = [
        Document.model_construct(multivector=each) for each in (body.query, *(document.embeddings for document in body.documents))
    ]
    weights = Weights.model_validate({"multivector": 1})
    return _ordered((await score_pairs(model, call, [query], documents, weights, Cut(), names=("query", "documents"))).raw)


def with_matrices(name: str | None, catalog: Catalog) -> Model:
    """Return the encoder of this name, or the first that gives token matrices. Raises InvalidRequest if it gives none."""
    first = next((each for each, model in catalog.models.items() if "multivector" in getattr(model.manifest, "outputs", ())), None)
    model = catalog.get(name or first, "encoder")
    model.tensors(["multivector"], param="model")
    return model


async def _matrices(
    model: Model, texts: Sequence[str], queries: int, pool_factor: float | None, call: Call, *, sent: bool = True
) -> list[Array]:
    """Return the token matrix of each text, of which the first ones are queries, which are not pooled."""
    call.item_errors = False  # the answers have no place for errors of texts
    request = EncodeRequest(inputs=texts, outputs=model.tensors(["multivector"]), queries=queries)
    if not sent:
        request.number_bytes = 0
    rows = (await model.answer(request, call)).rows
    if pool_factor is not None:
        rows = [*rows[:queries], *await pooled(rows[queries:], 0, pool_factor, item_errors=False)]
    return [row[0] for row in rows if not isinstance(row, ServiceError)]


def _ordered(scores: Sequence[float]) -> dict[str, Any]:
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return {"results": [{"index": at, "score": scores[at]} for at in order], "num_documents": len(scores)}
