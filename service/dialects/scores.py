"""vLLM's routes `/score` and `/v1/score`: a score for each pair of texts. Errors have OpenAI's form.

Source: vLLM's protocol of scoring, which has several names for the two fields. As there, a reranker's score is σ(logit), and an encoder's
is raw: a cosine, MaxSim or dot product. Additions: vectors in place of texts, and `weights`.
"""

import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import AliasChoices, BaseModel, Field, StrictBool, StrictInt

from service.dialects.given_vectors import Document, as_item
from service.dialects.openai.embeddings import ERRORS
from service.dialects.ranking import Weights, model_for, score_pairs
from service.dialects.text.schemas import VLLM, VLLM_IGNORED
from service.errors import InvalidRequest
from service.http.fields import Body, unsupported_fields
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many
from service.tokenization.texts import Cut


class ScoreRequest(Body):
    ignored = VLLM_IGNORED | {"user"}
    unsupported = unsupported_fields(VLLM, "cache_salt chat_template chat_template_kwargs max_tokens_per_doc max_tokens_per_query")

    text_1: str | Document | Many[str | Document] = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"), description="One text (or its vectors), or one for each of `text_2`."
    )
    text_2: str | Document | Many[str | Document] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"), description="The texts, or their vectors, to score."
    )
    model: str | None = Field(None, max_length=256, description="Name or alias of a served reranker or encoder.")
    weights: Weights | None = Field(None, description="How an encoder compares: by which vectors, mixed. Default: the best that it has.")
    use_activation: StrictBool = Field(True, description="False: a reranker's logits.")
    truncate_prompt_tokens: StrictInt | None = Field(None, ge=-1, lt=2**31, description="Cut to so many tokens; -1: to the model's limit.")


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0]


class ScoreResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


router = APIRouter(route_class=JsonRoute, tags=["vLLM"], responses=ERRORS)


@router.post("/score", response_model=ScoreResponse)
@router.post("/v1/score", response_model=ScoreResponse)
async def score(body: ScoreRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Score pairs: the first text with each of the others, or text by text."""
    call.item_errors = False  # the answer has no place for errors of pairs
    queries, documents = (
        [as_item(each) for each in (given if isinstance(given, list) else [given])] for given in (body.text_1, body.text_2)
    )
    model = model_for(body.model, [*queries, *documents], catalog)
    model.check_size(len(documents))
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            f"`text_1` has {len(queries)} texts and `text_2` has {len(documents)}: send one, or as many as in `text_2`", param="text_1"
        )
    limit = body.truncate_prompt_tokens
    cut = model.default_cut(True if limit else None) if limit is None or limit < 1 else Cut(side="right", max_tokens=limit)
    scored = await score_pairs(model, call, queries, documents, body.weights, cut, names=("text_1", "text_2"))
    ranks = model.manifest.traits.ranks
    scores = scored.scores if ranks and body.use_activation else scored.raw
    n_tokens = scored.answer.n_tokens
    return {
        "id": f"score-{call.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)],
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens, "completion_tokens": 0},
    }
