"""Orders documents by their relevance to a query, for every rerank route.

A reranker reads query and document together, and the score of its logit l is σ(l). With an encoder the score is (1 + c) / 2 for the cosine
c of the two vectors. Scores are float64. The order is by logit or cosine, then by index: so if two scores round to the same number, as σ
does above 36, the better document is still first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from service.call import Call
from service.catalog import Catalog, Model
from service.encoding.request import EncodeAnswer, EncodeRequest
from service.errors import EmptyInput, ServiceError
from service.runtime.onnx import Array
from service.tokenization.texts import Cut, Cutting, Encoded, TextEncoder

_TOGETHER = 100_000  # characters that one call tokenises

# The names that checkpoints give to the prompt of a role, the most common first. Any other role has its own name only.
_PROMPT_NAMES = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "corpus", "search_document"),
}


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document. `raw` is the logit or the cosine, `score` is in [0, 1]."""

    index: int
    raw: float
    score: float


@dataclass(frozen=True)
class Ranking:
    """`results` are the best `top_n`, best first; all other fields cover all documents of the request."""

    model: Model
    results: list[Ranked]
    n_tokens: int
    truncated: list[Cutting]  # documents; their tokens include the query's where both are read as a pair
    warnings: list[str]


async def rank(
    catalog: Catalog,
    call: Call,
    name: str | None,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None = None,
    max_document_tokens: int | None = None,
    cut: Callable[[Model], Cut] = lambda model: Cut(),
    field: str = "documents",
) -> Ranking:
    """Rank `documents` with the named model; without a name, with the first reranker, or else the first encoder.

    `cut` says how texts that are too long are truncated, `field` is the name of the documents in the caller's body.
    """
    model = catalog.get(name, "reranker", "encoder")
    call.item_errors = False  # documents cannot be ordered if some have no score
    texts, lost = await _shorten(catalog, model.texts, documents, max_document_tokens)
    by_pair = model.manifest.traits.ranks
    if not by_pair and "" in documents:
        raise EmptyInput(f"`{field}` cannot be empty, not one of them", param=field)
    raw, answer, warnings = await (_logits if by_pair else _cosines)(model, call, query, texts, cut(model))
    encoded = [item for item in answer.encoded if isinstance(item, Encoded)][-len(documents) :]
    before = [item.n_tokens + cut for item, cut in zip(encoded, lost, strict=True)]
    truncated = [Cutting(at, n, len(item.ids)) for at, (item, n) in enumerate(zip(encoded, before, strict=True)) if n > len(item.ids)]
    query_cut = None if by_pair else next((one for one in answer.truncated if one.index == 0), None)  # the first row is the query's
    call.report(truncated, query_cut)
    score = sigmoid if by_pair else _score_of_cosine
    results = [Ranked(index, raw[index], score(raw[index])) for index in best_first(raw)[:top_n]]
    return Ranking(model, results, answer.n_tokens, truncated, warnings)


def best_first(raw: Sequence[float]) -> list[int]:
    """Indices by descending number; equal ones keep their order."""
    return sorted(range(len(raw)), key=lambda index: -raw[index])


def sigmoid(logit: float) -> float:
    """1 / (1 + e^-l) in float64, for any finite logit."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def role_prompt(model: Model, role: str) -> str:
    """The checkpoint's prompt for texts of this role, or its default prompt if it has none."""
    names = _PROMPT_NAMES.get(role, (role,))
    return next((model.texts.prompts[name] for name in names if name in model.texts.prompts), model.texts.default_prompt)


async def _logits(model: Model, call: Call, query: str, documents: Sequence[str], cut: Cut) -> tuple[list[float], EncodeAnswer, list[str]]:
    answer = await model.answer(EncodeRequest(inputs=[(query, document) for document in documents], cut=cut), call)
    return [float(row[0]) for row in _arrays(answer)], answer, []


async def _cosines(model: Model, call: Call, query: str, documents: Sequence[str], cut: Cut) -> tuple[list[float], EncodeAnswer, list[str]]:
    """The query is the first row of the answer."""
    query_prompt, document_prompt = role_prompt(model, "search_query"), role_prompt(model, "search_document")
    # One request for both roles, so each text includes its prompt.
    inputs = [query_prompt + query, *(document_prompt + document for document in documents)]
    answer = await model.answer(EncodeRequest(inputs=inputs, cut=cut, prompt="", number_bytes=0), call)
    warnings = [f"{model.name} is an encoder, not a reranker: relevance_score is (1 + cosine) / 2 of the query's and the document's vector"]
    if answer.truncated and (first := answer.truncated[0]).index == 0:
        warnings.append(f"the query was cut: it has {first.tokens} tokens and {first.kept} were kept")
    vectors = np.array(_arrays(answer), np.float64)
    cosines = np.clip(np.einsum("nd,d->n", vectors[1:], vectors[0]), -1, 1)
    return [float(cosine) for cosine in cosines], answer, warnings


def _score_of_cosine(cosine: float) -> float:
    return (1 + cosine) / 2


def _arrays(answer: EncodeAnswer) -> list[Array]:
    return [row for row in answer.rows if not isinstance(row, ServiceError)]  # no row is an error: errors by item are off


async def _shorten(catalog: Catalog, texts: TextEncoder, documents: Sequence[str], limit: int | None) -> tuple[list[str], list[int]]:
    """The documents with at most `limit` tokens each, and how many tokens each has lost.

    The text itself is cut, because the rest of it is tokenised together with the query. A limit above the model's own has no effect.
    """
    if limit is None or limit >= texts.max_tokens:
        return list(documents), [0] * len(documents)
    together = sum(map(len, documents)) < _TOGETHER
    pieces: list[tuple[str, int]] = []
    for some in [documents] if together else [[document] for document in documents]:
        work = partial(_all_first_tokens, texts, some, limit)
        pieces += await catalog.tokenizers.run(work, size=sum(map(len, some)))
    return [text for text, _ in pieces], [lost for _, lost in pieces]


def _all_first_tokens(texts: TextEncoder, documents: Sequence[str], limit: int) -> list[tuple[str, int]]:
    return [_first_tokens(texts, document, limit) for document in documents]


def _first_tokens(texts: TextEncoder, document: str, limit: int) -> tuple[str, int]:
    (encoding,) = texts.tokenizer.encode_batch([document], add_special_tokens=False)  # unlike `encode`, it releases the GIL
    if len(encoding) <= limit:
        return document, 0
    return document[: encoding.offsets[limit - 1][1]], len(encoding) - limit
