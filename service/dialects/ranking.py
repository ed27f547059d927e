"""Orders documents by their relevance to a query, for every rerank route.

A reranker reads query and document together, and the score is σ(l) for its logit l. An encoder compares their vectors in its best way: by
MaxSim of token matrices, else by cosine, else by the dot product of sparse vectors; or in a mix that the request weights, as BGE-M3 does
(arXiv 2402.03216, section 3.2). Documents are ordered by the raw score, then by index. So the better document is first even if both scores
in [0, 1] round to the same number, as σ does for logits above 36.

In place of a text, an encoder also compares vectors of the request (`given_vectors.py`), which are not computed again.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from service.call import Call
from service.catalog import Catalog
from service.dialects.given_vectors import Document, Item, Matrix, Way, as_item, read_all
from service.dialects.tei.schemas import TeiRerankRequest
from service.encoding import sparse
from service.encoding.model import Model
from service.encoding.request import EncodeAnswer, EncodeRequest
from service.encoding.token_matrix import maxsim
from service.errors import EmptyInput, InvalidRequest, ServiceError
from service.http.fields import EMPTY, Body, unsupported_fields
from service.http.routing import Many
from service.runtime.onnx import Array
from service.runtime.steps import run_in_steps
from service.tokenization.texts import Cut, Cutting, Encoded, TextEncoder

_WAYS: tuple[Way, ...] = ("multivector", "dense", "sparse")  # an encoder's ways to compare texts, the best first
_TOGETHER = 100_000  # if the documents have fewer characters in total, one call tokenises all of them

_MEANINGS: dict[Way | Literal["mix"], str] = {
    "dense": "(1 + cosine) / 2 of the query's and the document's vector",
    "sparse": "s / (1 + s) for the dot product s of the query's and the document's sparse vector",
    "multivector": "(1 + m) / 2 for m = MaxSim divided by the number of the query's vectors",
    "mix": "(1 + s / (1 + |s|)) / 2 for the weighted sum s",
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
    query: Annotated[str, Field(min_length=1)] | Document = Field(description="The text, or its vectors, that documents are compared with.")
    documents: Many[str | Document] = Field(min_length=1, description="The documents to put in order, as texts or as vectors of texts.")
    top_n: int | None = Field(None, ge=0, lt=2**31, description="Send only this many of the best. Default, and with 0: all.")
    raw_scores: bool = Field(False, description="Send logits (for an encoder: cosines, MaxSim, dot products) instead of scores in [0, 1].")
    weights: Weights | None = Field(None, description="How an encoder compares: by which vectors, mixed. Default: the best that it has.")

    @property
    def texts(self) -> list[str | None]:
        """Return the text of each document, or None for vectors without one."""
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
    call.item_errors = False  # an error of one input fails the request, because documents cannot be ordered if some have no score
    query = as_item(body.query)
    documents: list[Item] = list(body.texts) if isinstance(body, TeiRerankRequest) else [as_item(each) for each in body.documents]
    model = model_for(body.model, [query, *documents], catalog)
    places = [at for at, document in enumerate(documents) if isinstance(document, str)]  # of the texts
    texts = [str(documents[at]) for at in places]
    shorter, lost = await _shorten(catalog, call, model.texts, texts, max_document_tokens)
    if "" in texts and not model.manifest.traits.ranks:
        raise EmptyInput(f"`{field}` cannot be empty, not one of them", param=field)
    for at, text in zip(places, shorter, strict=True):
        documents[at] = text
    scored = await score_pairs(model, call, [query], documents, getattr(body, "weights", None), cut(model), names=("query", field))
    answer = scored.answer
    encoded = [item for item in answer.encoded if isinstance(item, Encoded)][len(answer.encoded) - len(places) :]
    before = [item.n_tokens + cut for item, cut in zip(encoded, lost, strict=True)]
    truncated = [Cutting(at, n, len(item.ids)) for at, item, n in zip(places, encoded, before, strict=True) if n > len(item.ids)]
    query_cut = None
    if isinstance(query, str) and not model.manifest.traits.ranks:
        query_cut = next((one for one in answer.truncated if one.index == 0), None)  # the query is input 0
    call.report(truncated, query_cut)
    order = sorted(range(len(documents)), key=lambda index: -scored.raw[index])  # documents with equal scores keep their order
    scores = scored.raw if body.raw_scores else scored.scores
    best = [Ranked(index, scores[index]) for index in order[: body.top_n or None]]
    return Ranking(model, best, answer.n_tokens, truncated, scored.warnings)


def model_for(name: str | None, items: Sequence[Item], catalog: Catalog) -> Model:
    """Return the model that compares these items. Without a name, the first reranker, or the first encoder if there is no reranker or if
    items are vectors."""
    if all(isinstance(item, str) for item in items):
        return catalog.get(name, "reranker", "encoder")
    if (model := catalog.get(name, "encoder", "reranker")).manifest.traits.ranks:
        raise InvalidRequest(
            f"model {model.name} is a reranker, which reads texts and no vectors: send texts, or name an encoder", param="model"
        )
    return model


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + e^-l) for any finite logit l, in float64."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


@dataclass(frozen=True)
class Scored:
    """The scores of all documents: raw ones, which order them, and the same in [0, 1]."""

    raw: list[float]
    scores: list[float]
    answer: EncodeAnswer
    warnings: list[str]


async def score_pairs(
    model: Model,
    call: Call,
    queries: Sequence[Item],
    documents: Sequence[Item],
    weights: Weights | None,
    cut: Cut,
    *,
    names: tuple[str, str],
) -> Scored:
    """Score each document for the only query, or for its own one if there are as many queries as documents.

    `names`: the fields of the queries and of the documents, for errors.
    """
    if not model.manifest.traits.ranks:
        return await _by_vectors(model, call, queries, documents, weights, cut, names)
    if weights is not None:
        raise InvalidRequest(
            f"model {model.name} is a reranker, which has no `weights`: leave them out, or name an encoder", param="weights"
        )
    pairs: list[Any] = [(queries[at % len(queries)], document) for at, document in enumerate(documents)]
    answer = await model.answer(EncodeRequest(inputs=pairs, cut=cut), call)
    logits = [float(row[0][0]) for row in _rows(answer)]
    return Scored(logits, list(map(sigmoid, logits)), answer, [])


async def _by_vectors(
    model: Model,
    call: Call,
    queries: Sequence[Item],
    documents: Sequence[Item],
    weights: Weights | None,
    cut: Cut,
    names: tuple[str, str],
) -> Scored:
    """Score documents by their vectors and those of the queries. One request to the engine computes the vectors of all texts."""
    items = [*queries, *documents]
    model.check_size(len(items))
    labels = [f"{names[0]}.{at}" if len(queries) > 1 else names[0] for at in range(len(queries))]
    labels += [f"{names[1]}.{at}" for at in range(len(documents))]
    given = [(name, item) for name, item in zip(labels, items, strict=True) if not isinstance(item, str)]
    chosen = _ways(model, given, weights)
    ways = list(chosen)
    outputs = model.tensors(ways, param="weights")
    read = iter(await asyncio.to_thread(read_all, given, ways, model) if given else [])
    texts = [item for item in items if isinstance(item, str)]
    if texts:
        n_queries = sum(isinstance(query, str) for query in queries)
        request = EncodeRequest(inputs=texts, outputs=outputs, cut=cut, queries=n_queries, number_bytes=0)
        answer = await model.answer(request, call)
    else:
        answer = model.answer_without_inputs(outputs, len(items), call)
    way: Way | Literal["mix"] = ways[0] if len(ways) == 1 else "mix"
    warnings = [f"{model.name} is an encoder, not a reranker: relevance_score is {_MEANINGS[way]}"]
    if isinstance(queries[0], str) and answer.truncated and (first := answer.truncated[0]).index == 0:
        warnings.append(f"the query was cut: it has {first.tokens} tokens and {first.kept} were kept")
    computed = iter(_rows(answer))
    rows = [next(computed) if isinstance(item, str) else next(read) for item in items]
    pairs = [(rows[at % len(queries)], row) for at, row in enumerate(rows[len(queries) :])]
    n_vectors = np.array([len(query[ways.index("multivector")]) if "multivector" in ways else 1 for query, _ in pairs])
    found = np.array(await run_in_steps(_similarities(ways, query, row) for query, row in pairs)).T  # (ways, pairs)
    if way == "mix":
        by_way = [each / (n_vectors if way == "multivector" else 1) * chosen[way] for way, each in zip(ways, found, strict=True)]
        raw = np.sum(by_way, axis=0)
        return Scored(raw.tolist(), ((1 + raw / (1 + np.abs(raw))) / 2).tolist(), answer, warnings)
    raw = found[0]
    about = model.manifest.multivector
    if way == "sparse":
        scores = raw / (1 + raw)
    else:
        scores = ((1 + raw / n_vectors) / 2).clip(0, 1)
        raw = raw / n_vectors if about is not None and about.mean else raw
    return Scored(raw.tolist(), scores.tolist(), answer, warnings)


def _ways(model: Model, given: Sequence[tuple[str, Document]], weights: Weights | None) -> Mapping[Way, float]:
    """Return the weights by which an encoder compares. A request without any is compared in the best way that the model has and for which
    all vectors of the request are there. Raises InvalidRequest if vectors are missing."""
    if weights is None:
        has = [way for way in _WAYS if way in model.manifest.outputs and all(way in item.ways for _, item in given)]
        if not has:
            raise InvalidRequest(
                f"the vectors have no kind in common that model {model.name} gives too; it gives: {', '.join(model.manifest.outputs)}. "
                "Send one of these kinds for the query and all documents",
                param=given[0][0],
            )
        return {has[0]: 1.0}
    chosen = {way: weight for way in _WAYS if (weight := float(getattr(weights, way)))}
    for name, item in given:
        if missing := [way for way in chosen if way not in item.ways]:
            raise InvalidRequest(
                f"`{name}` has no {missing[0]} vector, which `weights` names: send it, or set that weight to 0", param=name
            )
    return chosen


def _similarities(ways: Sequence[Way], query: Sequence[Any], document: Sequence[Any]) -> list[float]:
    """Return the similarity of two rows in each of the ways."""
    found = []
    for way, one, other in zip(ways, query, document, strict=True):
        if way == "dense":
            found.append(float(np.clip(one.astype(np.float64) @ other, -1, 1)))
        else:
            found.append(sparse.dot(one, other) if way == "sparse" else maxsim(_floats(one), _floats(other)))
    return found


def _floats(matrix: Array | Matrix) -> Array:
    return matrix.floats() if isinstance(matrix, Matrix) else matrix


def _rows(answer: EncodeAnswer) -> list[tuple[Any, ...]]:
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
