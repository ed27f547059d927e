"""Orders documents by their relevance to a query, for every rerank route.

A reranker reads query and document together, and the score is σ(l) for its logit l. With an encoder, the score is (1 + c) / 2
for the cosine c of the two vectors. Scores are float64. Documents are ordered by logit or cosine, then by index. So the better
document is first even if both scores round to the same number, as σ does for logits above 36.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from pydantic import Field

from service.call import Call
from service.catalog import Catalog
from service.dialects.tei.schemas import TeiRerankRequest
from service.encoding.model import Model
from service.encoding.request import EncodeAnswer, EncodeRequest
from service.errors import EmptyInput, ServiceError
from service.http.fields import EMPTY, Body, unsupported_fields
from service.http.routing import Many
from service.runtime.onnx import Array
from service.tokenization.texts import Cut, Cutting, Encoded, TextEncoder

_TOGETHER = 100_000  # if the documents have fewer characters in total, one call tokenises all of them

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


class RerankRequest(Body, strict=True):
    """The fields that Cohere's and Jina's bodies share. Unknown fields are ignored. Types are strict: "7" and true are not numbers."""

    unsupported = unsupported_fields("relevant_spans", rank_fields=(EMPTY, ["text"]), max_chunks_per_doc=(EMPTY, 1, 10))

    model: str | None = Field(
        None, max_length=256, description="Name or alias of a served reranker, or of an encoder, which ranks by cosine."
    )
    query: str = Field(min_length=1, description="The text that the documents are compared with.")
    documents: Many[str | DocumentText] = Field(min_length=1, description="The documents to put in order.")
    top_n: int | None = Field(None, ge=0, lt=2**31, description="Send only this many of the best. Default, and with 0: all.")
    raw_scores: bool = Field(False, description="Send logits (for an encoder: cosines) instead of scores in [0, 1].")

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
    raw, answer, warnings = await (_logits if by_pair else _cosines)(model, call, body.query, texts, cut(model))
    encoded = [item for item in answer.encoded if isinstance(item, Encoded)][-len(documents) :]
    before = [item.n_tokens + cut for item, cut in zip(encoded, lost, strict=True)]
    truncated = [Cutting(at, n, len(item.ids)) for at, (item, n) in enumerate(zip(encoded, before, strict=True)) if n > len(item.ids)]
    query_cut = None if by_pair else next((one for one in answer.truncated if one.index == 0), None)  # the query is input 0
    call.report(truncated, query_cut)
    best = sorted(range(len(raw)), key=lambda index: -raw[index])[: body.top_n or None]  # documents with equal scores keep their order
    scores = raw if body.raw_scores else [sigmoid(number) if by_pair else (1 + number) / 2 for number in raw]
    return Ranking(model, [Ranked(index, scores[index]) for index in best], answer.n_tokens, truncated, warnings)


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + e^-l) for any finite logit l, in float64."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def role_prompt(model: Model, role: str) -> str:
    """Return the checkpoint's prompt for texts of this role, or its default prompt if the role has none."""
    names = _PROMPT_NAMES.get(role, (role,))
    return next((model.texts.prompts[name] for name in names if name in model.texts.prompts), model.texts.default_prompt)


async def _logits(model: Model, call: Call, query: str, documents: Sequence[str], cut: Cut) -> tuple[list[float], EncodeAnswer, list[str]]:
    answer = await model.answer(EncodeRequest(inputs=[(query, document) for document in documents], cut=cut), call)
    return [float(row[0]) for row in _arrays(answer)], answer, []


async def _cosines(model: Model, call: Call, query: str, documents: Sequence[str], cut: Cut) -> tuple[list[float], EncodeAnswer, list[str]]:
    """Return each document's cosine with the query, the model's answer and warnings. The query is the answer's first row."""
    query_prompt, document_prompt = role_prompt(model, "search_query"), role_prompt(model, "search_document")
    # One request contains both roles, so each text already includes its role's prompt.
    inputs = [query_prompt + query, *(document_prompt + document for document in documents)]
    answer = await model.answer(EncodeRequest(inputs=inputs, cut=cut, prompt="", number_bytes=0), call)
    warnings = [f"{model.name} is an encoder, not a reranker: relevance_score is (1 + cosine) / 2 of the query's and the document's vector"]
    if answer.truncated and (first := answer.truncated[0]).index == 0:
        warnings.append(f"the query was cut: it has {first.tokens} tokens and {first.kept} were kept")
    vectors = np.array(_arrays(answer), np.float64)
    cosines = np.clip(np.einsum("nd,d->n", vectors[1:], vectors[0]), -1, 1)
    return [float(cosine) for cosine in cosines], answer, warnings


def _arrays(answer: EncodeAnswer) -> list[Array]:
    return [
        row[0] for row in answer.rows if not isinstance(row, ServiceError)
    ]  # `rank` has turned errors by item off, so no row is an error


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
