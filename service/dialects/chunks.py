"""Vectors of a text's chunks: the field `chunks` of `/v1/embeddings`, and `/v1/contextualizedembeddings` of Voyage and Perplexity.

With `mode` "late" the encoder reads the whole text once, and each chunk's vector knows the text around it (`service/encoding/chunks.py`).
With "split" each chunk is read by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from export import contract
from service.call import Call
from service.encoding.chunks import Chunk, ChunkVectors, Span, Splitting, TokenisedText
from service.encoding.model import Model
from service.encoding.request import EncodeRequest
from service.encoding.space import SPACE_HEADER
from service.errors import BatchTooLarge, InvalidRequest, ServiceError
from service.http.fields import Body
from service.http.routing import Many
from service.runtime.onnx import Array
from service.tokenization.texts import Cut

_TOGETHER_BYTES = 16 * 1024 * 1024  # of token vectors in one request to the engine, at least two windows
_MOST_CHUNKS = 65_536  # of one request
_BOTH = (contract.POOLED, contract.TOKEN_EMBEDDINGS)
_SAME = 1e-3  # largest difference between a model's vector and the mean of its token vectors, relative to the length
Place = Annotated[int, Field(ge=0, strict=True)]


class Chunks(Body):
    """How each text is split into chunks."""

    size: int = Field(256, ge=1, le=1_000_000, strict=True, description="Most tokens of a chunk.")
    overlap: int = Field(0, ge=0, strict=True, description="Most tokens that a chunk repeats of the chunk before.")
    by: Literal["tokens", "sentences"] = Field("tokens", description="sentences: whole sentences, if they have at most `size` tokens.")
    spans: Many[Many[tuple[Place, Place]]] | None = Field(
        None, description="In place of `size` and `by`: for each input, the first character of each chunk and the one after its last."
    )
    mode: Literal["late", "split"] = Field("late", description="late: chunks know the whole text. split: each is read by itself.")

    @model_validator(mode="after")
    def _moves_on(self) -> Self:
        if self.overlap >= self.size:
            raise PydanticCustomError(
                "overlap", "overlap={overlap} must be below size={size}", {"overlap": self.overlap, "size": self.size}
            )
        return self


ChunksOfText = list[tuple[Chunk, Array]]


@dataclass(frozen=True)
class ChunkAnswer:
    """The chunks of each text with their vectors, or the text's error. `n_tokens`: the tokens that the encoder has read."""

    rows: list[ChunksOfText | ServiceError]
    n_tokens: int
    space: str


async def embed_chunks(
    model: Model, texts: Sequence[str], how: Chunks, call: Call, *, prompt: str = "", dimensions: int | None = None
) -> ChunkAnswer:
    """Split texts and compute the vector of each chunk. The error of a text that cannot be split is raised, but if the request asks for
    errors by item, it is the text's row.
    """
    model.check_size(len(texts))
    if how.spans is not None and len(how.spans) != len(texts):
        raise InvalidRequest(f"`chunks.spans` has {len(how.spans)} lists for {len(texts)} inputs: send one for each", param="chunks.spans")
    if how.mode == "late":
        await check_late(model, call)
    tokenised: list[tuple[TokenisedText, list[Chunk]] | ServiceError] = []
    for at, text in enumerate(texts):
        spans = None if how.spans is None else how.spans[at]
        model.check_length(len(text), at)
        split = partial(_split, model, text, prompt, at, how, spans)
        try:
            tokenised.append(await model.tokenizers.run(split, size=len(text), client=call.client))
        except ServiceError as error:
            if not call.item_errors:
                raise
            tokenised.append(error)
    good = [each for each in tokenised if not isinstance(each, ServiceError)]
    if (count := sum(len(chunks) for _, chunks in good)) > _MOST_CHUNKS:
        raise BatchTooLarge(f"the inputs have {count} chunks, and the most is {_MOST_CHUNKS}: send them in parts", param="chunks")
    before = call.tokens
    vectors = iter(await (_late(model, good, call, dimensions) if how.mode == "late" else _split_up(model, good, call, prompt, dimensions)))
    rows = [each if isinstance(each, ServiceError) else list(zip(each[1], next(vectors), strict=True)) for each in tokenised]
    return ChunkAnswer(rows, call.tokens - before, call.headers.get(SPACE_HEADER, ""))


def _split(
    model: Model, text: str, prompt: str, index: int, how: Chunks, spans: Sequence[Span] | None
) -> tuple[TokenisedText, list[Chunk]]:
    tokenised = TokenisedText(model.texts, text, prompt=prompt, index=index)
    if spans is None:
        return tokenised, tokenised.split(Splitting(size=how.size, overlap=how.overlap, by=how.by))
    if not spans:
        raise InvalidRequest(f"`chunks.spans` has no span for input {index}: send at least one", param="chunks.spans")
    return tokenised, tokenised.of_spans(spans)


async def _late(model: Model, texts: Sequence[tuple[TokenisedText, list[Chunk]]], call: Call, dimensions: int | None) -> list[list[Array]]:
    vectors = [ChunkVectors(text, chunks) for text, chunks in texts]
    windows = [(at, ids) for at, (text, _) in enumerate(texts) for ids in text.windows]
    width = next(tensor.shape[-1] for tensor in model.manifest.graph.outputs if tensor.name == contract.TOKEN_EMBEDDINGS)
    longest = max((len(ids) for _, ids in windows), default=1)
    each = min(max(2, _TOGETHER_BYTES // (4 * int(width) * longest)), model.settings.max_client_batch)
    for first in range(0, len(windows), each):
        some = windows[first : first + each]
        request = EncodeRequest(
            inputs=[ids for _, ids in some],
            outputs=(contract.TOKEN_EMBEDDINGS,),
            named=(contract.EMBEDDING,),
            row_width=dimensions,
            cut=Cut(side="none"),
            queries=0,
            number_bytes=0,
        )
        for (at, _), row in zip(some, (await model.answer(request, call)).rows, strict=True):
            if isinstance(row, ServiceError):
                raise row
            vectors[at].add(row[0])
    return [each.all() for each in vectors]


async def _split_up(
    model: Model, texts: Sequence[tuple[TokenisedText, list[Chunk]]], call: Call, prompt: str, dimensions: int | None
) -> list[list[Array]]:
    parts = [text.text[slice(*chunk.characters)] for text, chunks in texts for chunk in chunks]
    rows: list[Array] = []
    for first in range(0, len(parts), model.settings.max_client_batch):
        some = parts[first : first + model.settings.max_client_batch]
        request = EncodeRequest(
            inputs=some,
            outputs=(model.vector_output(True),),
            row_width=dimensions,
            cut=Cut(side="none"),
            prompt=prompt,
            number_bytes=0,
        )
        for row in (await model.answer(request, call)).rows:
            if isinstance(row, ServiceError):
                raise row
            rows.append(row[0])
    left = iter(rows)
    return [[next(left) for _ in chunks] for _, chunks in texts]


async def check_late(model: Model, call: Call) -> None:
    """Raise InvalidRequest unless the model's vector of a text is the mean of its token vectors."""
    if model.gives_means is None:
        request = EncodeRequest(inputs=["a few words"], outputs=_BOTH, named=(contract.EMBEDDING,), prompt="", number_bytes=0)
        (row,) = (await model.answer(request, call)).rows if model.manifest.pooling == "mean" else (None,)
        if isinstance(row, ServiceError):
            raise row
        model.gives_means = row is not None and _is_mean(*row)
    if not model.gives_means:
        raise InvalidRequest(
            f"model {model.name} makes the vector of a text by {model.manifest.pooling} pooling, perhaps with layers after it, so parts of "
            'a text have no vectors in it: use mode "split", or a model with mean pooling alone',
            param="chunks.mode",
        )


def _is_mean(pooled: Array, tokens: Array) -> bool:
    mean = tokens.mean(axis=0)
    return mean.shape == pooled.shape and float(np.linalg.norm(mean - pooled)) <= _SAME * float(np.linalg.norm(pooled))
