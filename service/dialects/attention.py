"""The route `/v1/attention`, which returns the attention weights of a text by layer and head, from each token to every token.

No other project has this route. Its errors have OpenAI's format. For a layer that computes no attention matrix, the route
returns how much of each token's value is in each token's output, and marks the layer as `effective`. Texts and answers are
limited in size, since the route is meant for inspection.
"""

import asyncio
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field, StrictBool

from export import contract
from service.call import NUMBER_BYTES
from service.catalog import Served
from service.dialects.openai.embeddings import ERRORS, OpenAIUsage
from service.errors import EmptyInput, InputTooLong, InvalidRequest, WrongKind
from service.http.fields import Fields
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many, json_response

MOST_NUMBERS = 500_000  # maximum number of weights in an answer, about 5 MB of JSON
Number = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]


class AttentionRequest(Fields):
    model: str | None = Field(None, max_length=256, description="Name or alias of a served model; the first that has maps without it.")
    input: str = Field(min_length=1, max_length=65_536, description="One text, read as it is: no prompt is put before it.")
    layers: Annotated[Many[Number], Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Counted from 0 or, below 0, from the end; all without it."
    )
    heads: Annotated[Many[Number], Field(min_length=1, max_length=1024)] | None = Field(None, description="Of each layer; all without it.")
    average_heads: StrictBool = Field(False, description="The mean over these heads in place of each.")


class LayerWeights(BaseModel):
    layer: int
    attention: str = Field(description="The layer's kind.")
    effective: bool = Field(description="The layer forms no such matrix: it is how much of each token's value is in each token's answer.")
    heads: list[int] = Field(description="That are shown, or that the mean is of.")
    weights: list[list[list[float]]] = Field(description="A matrix for each head, or one for their mean: [query][key].")


class AttentionResponse(BaseModel):
    object: Literal["attention"]
    model: str
    tokens: list[str] = Field(description="The piece of the text that each token is; of a special token its name.")
    token_ids: list[int]
    layers: list[LayerWeights]
    usage: OpenAIUsage


router = APIRouter(route_class=JsonRoute, tags=["Attention"], responses=ERRORS)


@router.post("/v1/attention", response_model=AttentionResponse)
async def attention(body: AttentionRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the attention weights of a text by layer and head, from each token to every token."""
    first = next((name for name, each in catalog.models.items() if each.manifest.attention_graph is not None), None)
    model = catalog.find(body.model or first)
    graph = model.manifest.attention_graph
    if graph is None:
        raise WrongKind(f"model {model.name} {contract.no_attention_graph(model.manifest)}", param="model")
    ids, tokens = _tokens(model, body.input, graph.max_tokens)
    layers = _chosen("layers", body.layers, len(graph.layers))
    heads = {layer: _chosen("heads", body.heads, graph.layers[layer].heads) for layer in layers}
    numbers = len(ids) ** 2 * sum(1 if body.average_heads else len(heads[layer]) for layer in layers)
    if numbers > MOST_NUMBERS:
        raise InvalidRequest(
            f"the answer would have {numbers} numbers for {len(ids)} tokens, and the most is {MOST_NUMBERS}: ask for fewer `layers` or "
            "`heads`, for `average_heads`, or send a shorter text",
            param="layers",
        )
    catalog.expect(call, numbers * NUMBER_BYTES, f"{numbers} numbers for {len(ids)} tokens")
    found = await catalog.attention(model, ids, layers, call.deadline)
    call.model = model.name
    call.tokens += len(ids)

    def answer() -> Any:
        entries = []
        for layer, A in zip(layers, found, strict=True):
            shown = A[heads[layer]]
            entry = {"layer": layer, "attention": graph.layers[layer].attention, "effective": graph.layers[layer].effective}
            weights = np.ascontiguousarray(shown.mean(0, keepdims=True) if body.average_heads else shown)
            entries.append({**entry, "heads": heads[layer], "weights": weights})
        usage = {"prompt_tokens": len(ids), "total_tokens": len(ids)}
        content = {"object": "attention", "model": model.name, "tokens": tokens, "token_ids": ids, "layers": entries, "usage": usage}
        return json_response(content, call)

    return await asyncio.to_thread(answer)  # off the event loop: the JSON can have megabytes


def _tokens(model: Served, text: str, longest: int) -> tuple[list[int], list[str]]:
    """Return the token ids of a text, and the piece of the text that each token covers."""
    try:
        found = model.tokenizer.encode(text)
    except TypeError:  # raised by `tokenizers` for half a surrogate pair
        raise InvalidRequest("`input` is not valid Unicode; send whole characters", param="input") from None
    if not found.ids:
        raise EmptyInput("`input` has no tokens", param="input")
    if len(found.ids) > longest:
        raise InputTooLong(f"`input` has {len(found.ids)} tokens, and attention is shown of at most {longest}; shorten it", param="input")
    return found.ids, [text[begin:end] or token for (begin, end), token in zip(found.offsets, found.tokens, strict=True)]


def _chosen(what: str, wanted: list[int] | None, n: int) -> list[int]:
    """Return the indices `wanted` as numbers from 0 to n - 1, in the order of the request. Negative indices count from the end.

    If `wanted` is None, return all indices. Raises InvalidRequest for the field `what` if an index does not exist.
    """
    if wanted is None:
        return list(range(n))
    if bad := [number for number in wanted if not -n <= number < n]:
        raise InvalidRequest(f"`{what}` has {bad[0]}, and there are {n}: 0 to {n - 1}, or -1 for the last", param=what)
    return list(dict.fromkeys(number % n for number in wanted))
