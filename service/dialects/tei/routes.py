"""Routes of text-embeddings-inference (TEI): `/embed`, `/rerank`, `/predict` and related ones.

Where the code of TEI's router and its OpenAPI document differ (413 for too many inputs, error types in lower case), this module
follows the code. Additions to TEI: `model` in each body, a JSON body on every error, NDJSON from `/embed`, and errors by item.
huggingface_hub's InferenceClient uses this dialect at `POST /`. TEI has no error type for a passed deadline. The answer is then 504
with the type Overloaded, because deadlines usually pass when the queue is full.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Response
from numpy.typing import NDArray
from pydantic import BaseModel

from export import contract
from service.call import ITEM_ERRORS_HEADER, WARNINGS_HEADER, Call
from service.catalog import ENCODER_KINDS, GENERATOR_KINDS, Catalog, Served
from service.dialects import jina, next_plaid, ranking, tgi
from service.dialects.input_types import as_role
from service.dialects.openai.embeddings import as_inputs
from service.dialects.search_outputs import SPARSE_BYTES
from service.dialects.tei.info import Info, describe
from service.dialects.tei.schemas import (
    ERRORS,
    LABELS,
    ErrorType,
    SimilarityParameters,
    TeiEmbedAllRequest,
    TeiEmbedRequest,
    TeiError,
    TeiPrediction,
    TeiPredictRequest,
    TeiRank,
    TeiRerankRequest,
    TeiSimilarityRequest,
    TeiTruncation,
    TeiWeight,
)
from service.dialects.text.schemas import STREAM
from service.encoding import sparse, vectors
from service.encoding.model import Model
from service.encoding.request import EncodeAnswer, EncodeRequest, Row
from service.errors import (
    DeadlineExceeded,
    EmptyInput,
    InputTooLong,
    InvalidRequest,
    NotReady,
    Overloaded,
    RuntimeFailed,
    ServiceError,
    TokenizationFailed,
    WrongKind,
)
from service.http.dialect import Dialect
from service.http.fields import is_empty, refusal, schema_of
from service.http.gate import refused
from service.http.ndjson import stream
from service.http.routing import CallDep, CatalogDep, ContentDep, JsonRoute, read
from service.runtime.onnx import Array
from service.tokenization.texts import Cut, Input

Scores = NDArray[np.float64]

_MOST_NAMED = 64  # most failed inputs that the header x-item-errors lists, after the number of all failed inputs

# The error type of each class; the first class that matches counts. The type of other errors is Validation below status 500, else Backend.
_ERROR_TYPES: tuple[tuple[type[ServiceError], ErrorType], ...] = (
    (EmptyInput, "Empty"),
    (InputTooLong, "Validation"),
    (TokenizationFailed, "Tokenizer"),
    (Overloaded, "Overloaded"),
    (DeadlineExceeded, "Overloaded"),
    (NotReady, "Unhealthy"),
    (WrongKind, "Backend"),
)


def error_type(error: ServiceError) -> ErrorType:
    rest: ErrorType = "Validation" if error.status < 500 else "Backend"
    return next((name for kind, name in _ERROR_TYPES if isinstance(error, kind)), rest)


def render(error: ServiceError) -> tuple[int, Any]:
    status = 424 if isinstance(error, RuntimeFailed) else error.status
    empty = isinstance(error, EmptyInput) and error.param == "input" and error.message.endswith("cannot be empty")
    return status, {"error": "`inputs` cannot be empty" if empty else error.message, "error_type": error_type(error)}


_COMPUTING = ("/embed", "/embed_all", "/embed_sparse", "/similarity", "/rerank", "/predict", "/invocations")
_TELLING = ("/tokenize", "/decode", "/info", "/health", "/ping")
DIALECT = Dialect("tei", (*_COMPUTING, *_TELLING, "/"), render)  # "/" matches only the root path
_RERANK_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": TeiError | jina.JinaErrorResponse} for status in ERRORS}
_ANY_ANSWERS: dict[int | str, dict[str, Any]] = {**STREAM, **{status: {"model": TeiError | tgi.TgiError} for status in ERRORS}}
router = APIRouter(route_class=JsonRoute, tags=["text-embeddings-inference"], responses=ERRORS)


# Vectors -------------------------------------------------------------------------------------------------------------------------------


@router.post("/embed", response_model=list[list[float] | None])
async def embed(body: TeiEmbedRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return a vector for each input. With `Accept: application/x-ndjson`, each vector is sent as soon as it is computed."""
    model = catalog.get(body.model, "encoder")
    vectors.check_dimensions(body.dimensions, model.manifest.width)
    request = _request(body, model, outputs=(model.vector_output(body.normalize),), row_width=body.dimensions)

    def vector(row: Row) -> Array:
        return vectors.cut(row[0], body.dimensions, normalize=body.normalize)

    def entry(index: int, row: Any) -> dict[str, Any]:
        if isinstance(row, ServiceError):
            return {"index": index, **render(row)[1]}
        return {"index": index, "embedding": vector(row)}

    if call.ndjson:
        return await stream(model, request, call, entry, render)
    return settle(await model.answer(request, call), call, model, vector)


@router.post("/embed_all", response_model=list[list[list[float]] | None])
async def embed_all(body: TeiEmbedAllRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the vector of each token of each input, including special tokens. The vectors are not normalised."""
    model = catalog.get(body.model, "encoder")
    request = _request(body, model, outputs=(contract.TOKEN_EMBEDDINGS,))
    return settle(await model.answer(request, call), call, model, lambda row: row[0])


@router.post("/embed_sparse", response_model=list[list[TeiWeight] | None])
async def embed_sparse(body: TeiEmbedAllRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the sparse vector of each input: the weights above 0, by ascending index."""
    model = catalog.get(body.model, "encoder")
    if "sparse" not in model.manifest.outputs:
        raise WrongKind(f"model {model.name} gives no sparse vectors; it gives: {', '.join(model.manifest.outputs)}")
    # Each weight has the names of its fields, so it takes twice the bytes.
    request = _request(body, model, outputs=model.tensors(["sparse"]), number_bytes=2 * SPARSE_BYTES)

    def weights(row: Row) -> list[dict[str, Any]]:
        indices, values = sparse.unpacked(sparse.cut(row[0]))
        return [{"index": index, "value": value} for index, value in zip(indices.tolist(), values.tolist(), strict=True)]

    return settle(await model.answer(request, call), call, model, weights)


@router.post("/similarity", response_model=list[float | None])
async def similarity(body: TeiSimilarityRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the cosine similarity of the source sentence with each of the other sentences."""
    model = catalog.get(body.model, "encoder")
    parameters = body.parameters or SimilarityParameters()
    sentences = [body.inputs.source_sentence, *body.inputs.sentences]
    queries, prompt = as_role(model, len(sentences), prompt_name=parameters.prompt_name)
    request = EncodeRequest(inputs=sentences, cut=as_cut(parameters, model), queries=queries, prompt=prompt, number_bytes=0)
    answer = await model.answer(request, call)
    source, *others = answer.rows
    if isinstance(source, ServiceError):
        raise source
    unit = source[0].astype(np.float64)
    return settle(EncodeAnswer(others, answer.encoded), call, model, lambda row: float(np.clip(unit @ row[0], -1, 1)))


# Scores --------------------------------------------------------------------------------------------------------------------------------


_RERANK = {
    "required": True,
    "content": {"application/json": {"schema": {"anyOf": [schema_of(TeiRerankRequest), schema_of(jina.JinaRerankRequest)]}}},
}


@router.post(
    "/rerank",
    response_model=list[TeiRank] | jina.JinaRerankResponse,
    response_model_exclude_none=True,
    responses=_RERANK_ERRORS,
    openapi_extra={"requestBody": _RERANK},
)
async def rerank(content: ContentDep, call: CallDep, catalog: CatalogDep) -> Any:
    """Rank the texts by their score for the query, best first. A score is the sigmoid of the logit, or with `raw_scores` the
    logit itself.

    An encoder's scores are (1 + cosine) / 2, with a warning in the header `x-warnings`. A body with `documents` has Jina's
    format, and so has its answer; with `raw_scores` too, infinity's. If its `query` is a list of vectors, it has next-plaid's.
    """
    if b'"documents"' in content and (kind := read(_RerankKind, content)).documents is not None and not kind.texts:
        if isinstance(kind.query, list):
            try:
                return await next_plaid.rerank(read(next_plaid.PlaidRerankRequest, content, call), call, catalog)
            except ServiceError as error:
                return refused(error, next_plaid.DIALECT)
        try:
            body = read(jina.JinaRerankRequest, content, call)
            if kind.raw_scores is not None:
                return await jina.answer(body, call, catalog, body.texts)
            return await jina.rerank(body, call, catalog)
        except ServiceError as error:
            return refused(error, jina.DIALECT)
    return await _ranked(read(TeiRerankRequest, content, call), call, catalog)


class _RerankKind(BaseModel):
    """The fields that show whether the body of `/rerank` has the format of TEI, Jina, infinity or next-plaid."""

    query: Any = None
    texts: Any = None
    documents: Any = None
    raw_scores: Any = None


async def _ranked(body: TeiRerankRequest, call: Call, catalog: Catalog) -> list[dict[str, Any]]:
    ranked = await ranking.rank(body, call, catalog, cut=lambda model: as_cut(body, model), field="texts")
    call.headers.update(measures(call, ranked.model, len(body.texts)))
    if ranked.warnings:
        call.headers[WARNINGS_HEADER] = "; ".join(ranked.warnings)
    return [
        {"index": one.index, "score": one.score, **({"text": body.texts[one.index]} if body.return_text else {})} for one in ranked.results
    ]


@router.post("/predict", response_model=list[TeiPrediction] | list[list[TeiPrediction] | None])
async def predict(body: TeiPredictRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return all labels of a text or pair with their scores, best first. A batch gets a list of such lists. A reranker has one label."""
    model = catalog.get(body.model, "classifier", "reranker")  # without a name, prefer a classifier: rerankers have `/rerank`
    single = isinstance(body.inputs, str) or isinstance(body.inputs[0], str)
    sequences: list[Any] = [body.inputs] if single else list(body.inputs)
    inputs: list[Input] = [each if isinstance(each, str) else each[0] if len(each) == 1 else tuple(each) for each in sequences]
    answer = await model.answer(EncodeRequest(inputs=inputs, cut=as_cut(body, model)), call)
    activation, labels = activation_of(body, model), model.manifest.id2label
    top_k = body.parameters.top_k if body.parameters else None

    def predictions(row: Row) -> list[dict[str, Any]]:
        logits = row[0].astype(np.float64)
        scores = activation(logits).tolist()
        best = np.argsort(-logits, kind="stable")[:top_k].tolist()
        return [{"score": scores[index], "label": labels.get(index, f"LABEL_{index}")} for index in best]

    predicted = settle(answer, call, model, predictions)
    return predicted[0] if single and predicted[0] is not None and body.parameters is None else predicted


def sigmoid(logits: Scores) -> Scores:
    scores: Scores = np.exp(-np.logaddexp(0.0, -logits))  # does not overflow for large logits
    return scores


def softmax(logits: Scores) -> Scores:
    powers = np.exp(logits - logits.max())
    scores: Scores = powers / powers.sum()
    return scores


_ACTIVATIONS: dict[str, Callable[[Scores], Scores]] = {"sigmoid": sigmoid, "softmax": softmax, "identity": np.asarray, "none": np.asarray}


def activation_of(body: TeiPredictRequest, model: Model) -> Callable[[Scores], Scores]:
    """Return the function that turns logits into scores, which is the one that the request names, if any.

    Otherwise a reranker uses the sigmoid, as in TEI, even if its checkpoint names another function. A classifier uses the function that its
    manifest names.
    """
    if body.raw_scores:
        return _ACTIVATIONS["none"]
    if body.parameters and body.parameters.function_to_apply:
        return _ACTIVATIONS[body.parameters.function_to_apply]
    return sigmoid if model.manifest.traits.ranks else _ACTIVATIONS[model.manifest.score_activation]


# The service itself --------------------------------------------------------------------------------------------------------------------


@router.get("/info", response_model=Info)
async def info(
    call: CallDep, catalog: CatalogDep, model: Annotated[str | None, Query(description="Name or alias; the first without it.")] = None
) -> Any:
    """Return the properties and limits of a model, or 424 for a model that generates text, which TEI's format cannot describe."""
    try:
        found = catalog.get(model or call.wanted)
    except WrongKind as error:
        raise WrongKind(f"{error.message}. Served of these: {', '.join(catalog.encoders) or 'none'}", param="model") from None
    return describe(found, catalog)


@router.get("/health", response_class=Response)
@router.get("/ping", response_class=Response)
async def health(catalog: CatalogDep) -> Any:
    """Return 200 without a body if every model is healthy, otherwise 503."""
    if await catalog.ready():
        return Response()
    raise NotReady(f"unhealthy: {reason}" if (reason := catalog.why_not_ready()) else "unhealthy")


# The route for any model ----------------------------------------------------------------------------------------------------------------


_OF_TEXTS = frozenset({*tgi.TgiParameters.model_fields, *tgi.TgiParameters.unsupported} - {"top_k", "truncate"})


_OF_LABELS = ("function_to_apply", *LABELS)
_LABELLING = ("classifier", "reranker")  # kinds of model that `/predict` takes


class LabelsRefused(InvalidRequest):
    """`POST /` was asked for labels of a text that its model does not give."""

    status = 400  # huggingface_hub shows the message of this status


class _BodyKind(BaseModel):
    """The fields of a body that show which kinds of model it is meant for."""

    model: str | None = None
    stream: Any = None
    query: Any = None
    inputs: Any = None
    parameters: Any = None

    @property
    def asks_labels(self) -> str | None:
        """Return the field of `parameters` with which huggingface_hub asks for labels of a text, or None."""
        parameters = self.parameters if isinstance(self.parameters, dict) else {}
        return next((name for name in _OF_LABELS if not is_empty(parameters.get(name))), None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of model that the body is valid for, the most likely first. Only decoders accept `stream` and generation
        parameters. huggingface_hub sends `parameters`, even if empty, with texts to continue or classify, never with texts to
        embed. A field that is null counts as absent.
        """
        parameters = self.parameters if isinstance(self.parameters, dict) else {}
        if self.asks_labels:
            return _LABELLING
        if self.stream is not None or any(parameters.get(name) is not None for name in _OF_TEXTS):
            return GENERATOR_KINDS
        if self.parameters is not None and not isinstance(self.inputs, dict):
            return tuple(kind for kind, traits in contract.KINDS.items() if traits.output != contract.EMBEDDING)
        return ENCODER_KINDS


_BODIES = (TeiEmbedRequest, TeiSimilarityRequest, TeiRerankRequest, TeiPredictRequest, tgi.TgiRequest)
_ANY = {"required": True, "content": {"application/json": {"schema": {"anyOf": [schema_of(body) for body in _BODIES]}}}}


@router.post("/", response_model=list[Any], responses=_ANY_ANSWERS, openapi_extra={"requestBody": _ANY})
@router.post("/invocations", response_model=list[Any], responses=_ANY_ANSWERS, openapi_extra={"requestBody": _ANY})
async def invoke(content: ContentDep, call: CallDep, catalog: CatalogDep) -> Any:
    """Answer as the route for the model's kind. An encoder answers as /embed (or /similarity if `inputs` is an object), a
    reranker as /rerank (or /predict if the body has `inputs`), a classifier as /predict, a decoder as /generate (or
    /generate_stream with `stream`).

    If the body names no model, the first model that the body is valid for answers.
    """
    glance = read(_BodyKind, content, call)
    await asyncio.sleep(0)  # let other tasks run before a large body is parsed again
    model = catalog.find(glance.model or catalog.first(glance.kinds), *contract.KINDS)
    traits = model.manifest.traits
    if glance.asks_labels:
        _check_labels(glance.asks_labels, model)
    if traits.pool == "generator" or (not glance.model and glance.kinds == GENERATOR_KINDS):
        return await _continued(content, call, catalog)
    if traits.output == contract.EMBEDDING:
        if isinstance(glance.inputs, dict):
            return await similarity(read(TeiSimilarityRequest, content, call), call, catalog)
        return await embed(read(TeiEmbedRequest, content, call), call, catalog)
    if traits.ranks and glance.inputs is None:
        return await _ranked(read(TeiRerankRequest, content, call), call, catalog)
    return await predict(read(TeiPredictRequest, content, call), call, catalog)


def _check_labels(name: str, model: Served) -> None:
    """Raise LabelsRefused if no model here knows the parameter, or this one gives no labels of a text."""
    param = f"parameters.{name}"
    if (accepted := LABELS.get(name)) is not None:
        elsewhere = "/predict gives the labels of a whole text, and /rerank scores texts, such as labels, for a query"
        raise LabelsRefused(f"`{param}` {refusal(accepted)}; {elsewhere}", param=param)
    if model.manifest.kind not in _LABELLING:
        said = f"`{param}` asks for labels of a text, which POST /predict gives with a classifier; {model.name} is of kind"
        raise LabelsRefused(f"{said} {model.manifest.kind}: name a classifier as `model`, or leave the parameter out", param=param)


async def _continued(content: bytes, call: Call, catalog: Catalog) -> Any:
    """Answer `POST /` as text-generation-inference does, with errors in the format of text-generation-inference."""
    try:
        body = read(tgi.TgiRequest, content, call)
        return await tgi.continuation(body, call, catalog, stream=body.stream, listed=True)
    except ServiceError as error:
        return refused(error, tgi.DIALECT)


# What the routes share -----------------------------------------------------------------------------------------------------------------


def _request(body: TeiEmbedAllRequest, model: Model, **fields: Any) -> EncodeRequest:
    inputs = as_inputs(body.inputs)
    queries, prompt = as_role(model, len(inputs), prompt_name=body.prompt_name)
    return EncodeRequest(inputs=inputs, cut=as_cut(body, model), queries=queries, prompt=prompt, **fields)


def as_cut(body: TeiTruncation, model: Model) -> Cut:
    cut = model.default_cut(body.truncate)
    return Cut(side="left") if cut.side == "right" and body.truncation_direction in ("Left", "left") else cut


def settle(answer: EncodeAnswer, call: Call, model: Model, form: Callable[[Row], Any]) -> list[Any]:
    """Return `form(row)` for each row of the answer, and set the response's headers. A failed row raises its error, unless the
    request asked for errors by item. Then the row is None and a header lists it."""
    shaped: list[Any] = []
    failed: list[str] = []
    for index, row in enumerate(answer.rows):
        try:
            if isinstance(row, ServiceError):
                raise row
            shaped.append(form(row))
        except ServiceError as error:
            if not call.item_errors:
                raise
            shaped.append(None)
            failed.append(f"{index}:{error_type(error)}")
    if call.item_errors:
        named = ", ".join(failed[:_MOST_NAMED]) + (", ..." if len(failed) > _MOST_NAMED else "")
        call.headers[ITEM_ERRORS_HEADER] = f"{len(failed)}; {named}" if failed else "0"
    call.headers.update(measures(call, model, len(answer.encoded)))
    return shaped


def measures(call: Call, model: Model, size: int) -> dict[str, str]:
    """Return TEI's response headers: the sizes of the request, and times in ms. The times of tokenisation, queue and inference are means
    over the `size` inputs."""
    total_ms = str(int((time.monotonic() - call.started) * 1e3))
    return {
        "x-compute-type": "cpu+optimized" if model.provider == "CPUExecutionProvider" else "gpu+optimized",
        "x-compute-time": total_ms,
        "x-compute-characters": str(call.characters),
        "x-compute-tokens": str(call.tokens),
        "x-total-time": total_ms,
        "x-tokenization-time": str(int(call.tokenization_s / size * 1e3)),
        "x-queue-time": str(int(call.spent.queue_s / size * 1e3)),
        "x-inference-time": str(int(call.spent.inference_s / size * 1e3)),
    }
