"""Orders documents by their relevance to a query, for every rerank route.

A reranker reads query and document together, and the score is σ(l) for its logit l. An encoder compares their vectors in its best way: by
MaxSim of token matrices, else by cosine, else by the dot product of sparse vectors; or in a mix that the request weights, as BGE-M3 does
(arXiv 2402.03216, section 3.2). Documents are ordered by the raw score, then by index. So the better document is first even if both scores
in [0, 1] round to the same number, as σ does for logits above 36.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from service.call import Call
from service.catalog import Catalog
from service.dialects.tei.schemas import TeiRerankRequest
from service.encoding import sparse
from service.encoding.model import Model
from service.encoding.request import EncodeAnswer, EncodeRequest, Row
from service.encoding.token_matrix import maxsim
from service.errors import EmptyInput, InvalidRequest, ServiceError
from service.http.fields import EMPTY, Body, unsupported_fields
from service.http.routing import Many
from service.runtime.onnx import Array
from service.tokenization.texts import Cut, Cutting, Encoded, TextEncoder

Way = Literal["dense", "sparse", "multivector"]

_TOGETHER = 100_000  # if the documents have fewer characters in total, one call tokenises all of them

_MEANINGS: dict[Way | Literal["mix"], str] = {
    "dense": "(1 + cosine) / 2 of the query's and the document's vector",
    "sparse": "s / (1 + s) for the dot product s of the query's and the document's sparse vector",
    "multivector": "(1 + m) / 2 for m = MaxSim divided by the number of the query's vectors",
    "mix": "(1 + s / (1 + |s|)) / 2 for the weighted sum s",
}

# The names that checkpoints give to the prompt of a role, the most common first. For any other role, the name is the role itself.
_PROMPT_NAMES = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "corpus", "search_document"),
}


@dataclass(frozen=True, slots=True)
class Ranked:
    """A ranked document. `score` is in [0, 1], or it is the logit or cosine if the request asks for raw scores."""

    index: int
    score: float


@dataclass(frozen=True)
class Ranking:
    """The result of `rank`. `results` has only the `top_n` best documents, best first. The other fields are about all documents."""

    model: Model
    results: list[Ranked]
    n_tokens: int
    truncated: list[Cutting]  # truncated documents; with a reranker, their tokens include the query's
    warnings: list[str]


class DocumentText(Body):
    text: str


class Weights(Body, strict=True):
    """The weights of a mixed score: of cosines, of dot products of sparse vectors, and of MaxSim divided by the query's vectors."""

    dense: float = Field(0.0, ge=0, le=1e6, allow_inf_nan=False)
    sparse: float = Field(0.0, ge=0, le=1e6, allow_inf_nan=False)
    multivector: float = Field(0.0, ge=0, le=1e6, allow_inf_nan=False)

    @model_validator(mode="after")
    def _weighs_something(self) -> Self:
        if not (self.dense or self.sparse or self.multivector):
            raise PydanticCustomError("all_zero", "at least one of dense, sparse and multivector must be above 0")
        return self


class RerankRequest(Body, strict=True):
    """The fields that Cohere's and Jina's bodies share. Unknown fields are ignored. Types are strict: "7" and true are not numbers."""

    unsupported = unsupported_fields("relevant_spans", rank_fields=(EMPTY, ["text"]), max_chunks_per_doc=(EMPTY, 1, 10))

    model: str | None = Field(
        None, max_length=256, description="Name or alias of a served reranker, or of an encoder, which ranks by cosine."
    )
    query: str = Field(min_length=1, description="The text that the documents are compared with.")
    documents: Many[str | DocumentText] = Field(min_length=1, description="The documents to put in order.")
    top_n: int | None = Field(None, ge=0, lt=2**31, description="Send only this many of the best. Default, and with 0: all.")
    raw_scores: bool = Field(False, description="Send logits (for an encoder: cosines, MaxSim, dot products) instead of scores in [0, 1].")
    weights: Weights | None = Field(None, description="How an encoder compares: by which vectors, mixed. Default: the best that it has.")

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


async def rank(
    body: RerankRequest | TeiRerankRequest,
    call: Call,
    catalog: Catalog,
    *,
    max_document_tokens: int | None = None,
    cut: Callable[[Model], Cut] = lambda model: Cut(),
    field: str = "documents",
) -> Ranking:
    """Rank the documents with the body's model. Without a name, use the first reranker, or the first encoder if there is no reranker.

    `cut` returns how a model truncates texts that are too long. `field` is the name of the documents in the body, for errors.
    """
    model, documents = catalog.get(body.model, "reranker", "encoder"), body.texts
    call.item_errors = False  # an error of one input fails the request, because documents cannot be ordered if some have no score
    texts, lost = await _shorten(catalog, call, model.texts, documents, max_document_tokens)
    by_pair = model.manifest.traits.ranks
    if not by_pair and "" in documents:
        raise EmptyInput(f"`{field}` cannot be empty, not one of them", param=field)
    weights = getattr(body, "weights", None)
    if by_pair and weights is not None:
        raise InvalidRequest(
            f"model {model.name} is a reranker, which has no `weights`: leave them out, or name an encoder", param="weights"
        )
    if by_pair:
        scored = await _by_pairs(model, call, body.query, texts, cut(model))
    else:
        chosen = _best_way(model) if weights is None else weights.model_dump()
        scored = await _by_vectors(model, call, body.query, texts, cut(model), chosen)
    answer = scored.answer
    encoded = [item for item in answer.encoded if isinstance(item, Encoded)][-len(documents) :]
    before = [item.n_tokens + cut for item, cut in zip(encoded, lost, strict=True)]
    truncated = [Cutting(at, n, len(item.ids)) for at, (item, n) in enumerate(zip(encoded, before, strict=True)) if n > len(item.ids)]
    query_cut = None if by_pair else next((one for one in answer.truncated if one.index == 0), None)  # the query is input 0
    call.report(truncated, query_cut)
    order = sorted(range(len(documents)), key=lambda index: -scored.raw[index])  # documents with equal scores keep their order
    scores = scored.raw if body.raw_scores else scored.scores
    best = [Ranked(index, scores[index]) for index in order[: body.top_n or None]]
    return Ranking(model, best, answer.n_tokens, truncated, scored.warnings)


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + e^-l) for any finite logit l, in float64."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def role_prompt(model: Model, role: str) -> str:
    """Return the checkpoint's prompt for texts of this role, or its default prompt if the role has none."""
    names = _PROMPT_NAMES.get(role, (role,))
    return next((model.texts.prompts[name] for name in names if name in model.texts.prompts), model.texts.default_prompt)


@dataclass(frozen=True)
class Scored:
    """The scores of all documents: raw ones, which order them, and the same in [0, 1]."""

    raw: list[float]
    scores: list[float]
    answer: EncodeAnswer
    warnings: list[str]


async def _by_pairs(model: Model, call: Call, query: str, documents: Sequence[str], cut: Cut) -> Scored:
    answer = await model.answer(EncodeRequest(inputs=[(query, document) for document in documents], cut=cut), call)
    logits = [float(row[0][0]) for row in _rows(answer)]
    return Scored(logits, list(map(sigmoid, logits)), answer, [])


async def _by_vectors(model: Model, call: Call, query: str, documents: Sequence[str], cut: Cut, weights: Mapping[Way, float]) -> Scored:
    """Score documents by their vectors and the query's, which is the answer's first row."""
    ways = [way for way, weight in weights.items() if weight]
    query_prompt, document_prompt = role_prompt(model, "search_query"), role_prompt(model, "search_document")
    # One request contains both roles, so each text already includes its role's prompt.
    inputs = [query_prompt + query, *(document_prompt + document for document in documents)]
    outputs = model.tensors(ways, param="weights")
    answer = await model.answer(EncodeRequest(inputs=inputs, outputs=outputs, cut=cut, prompt="", queries=1, number_bytes=0), call)
    way: Way | Literal["mix"] = ways[0] if len(ways) == 1 else "mix"
    warnings = [f"{model.name} is an encoder, not a reranker: relevance_score is {_MEANINGS[way]}"]
    if answer.truncated and (first := answer.truncated[0]).index == 0:
        warnings.append(f"the query was cut: it has {first.tokens} tokens and {first.kept} were kept")
    rows = _rows(answer)
    found = await asyncio.to_thread(lambda: [_similarities(way, *[row[at] for row in rows]) for at, way in enumerate(ways)])
    n_vectors = len(rows[0][ways.index("multivector")]) if "multivector" in ways else 1
    if way == "mix":
        by_way = [np.array(each) / (n_vectors if way == "multivector" else 1) * weights[way] for way, each in zip(ways, found, strict=True)]
        raw = np.sum(by_way, axis=0)
        return Scored(raw.tolist(), ((1 + raw / (1 + np.abs(raw))) / 2).tolist(), answer, warnings)
    raw = np.array(found[0])
    about = model.manifest.multivector
    if way == "sparse":
        scores = raw / (1 + raw)
    else:
        scores = (1 + raw / n_vectors) / 2
        raw = raw / n_vectors if about is not None and about.mean else raw
    return Scored(raw.tolist(), scores.tolist(), answer, warnings)


def _best_way(model: Model) -> Mapping[Way, float]:
    """Return the way in which an encoder compares texts if a request names none: by token matrices, else by vectors, else sparsely."""
    ways: tuple[Way, ...] = ("multivector", "dense", "sparse")
    return {next(way for way in ways if way in model.manifest.outputs): 1.0}


def _similarities(way: Way, query: Array, *documents: Array) -> list[float]:
    if way == "dense":
        return [float(np.clip(query.astype(np.float64) @ document, -1, 1)) for document in documents]
    return [(sparse.dot if way == "sparse" else maxsim)(query, document) for document in documents]


def _rows(answer: EncodeAnswer) -> list[Row]:
    return [row for row in answer.rows if not isinstance(row, ServiceError)]  # `rank` has turned errors by item off, so no row is an error


async def _shorten(
    catalog: Catalog, call: Call, texts: TextEncoder, documents: Sequence[str], limit: int | None
) -> tuple[list[str], list[int]]:
    """Return the documents, each cut to at most `limit` tokens, and for each document the number of tokens that were cut off.

    It returns texts and not token ids, because the model tokenises the documents again, a reranker together with the query. A limit above
    the model's own has no effect.
    """
    if limit is None or limit >= texts.max_tokens:
        return list(documents), [0] * len(documents)

    def first_tokens(document: str) -> tuple[str, int]:
        (encoding,) = texts.tokenizer.encode_batch([document], add_special_tokens=False)  # `encode` would hold the GIL
        if len(encoding) <= limit:
            return document, 0
        return document[: encoding.offsets[limit - 1][1]], len(encoding) - limit

    together = sum(map(len, documents)) < _TOGETHER
    pieces: list[tuple[str, int]] = []
    for some in [documents] if together else [[document] for document in documents]:
        pieces += await catalog.tokenizers.run(partial(list, map(first_tokens, some)), size=sum(map(len, some)), client=call.client)
    return [text for text, _ in pieces], [lost for _, lost in pieces]
