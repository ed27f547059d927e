"""Vectors of a text's chunks: the field `chunks` of `/v1/embeddings`, and `/v1/contextualizedembeddings` of Voyage and Perplexity.

With `mode` "late" the encoder reads the whole text once, and each chunk's vector knows the text around it (`service/encoding/chunks.py`).
With "split" each chunk is read by itself.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from export import contract
from service.call import NUMBER_BYTES, Call
from service.encoding.chunks import Chunk, ChunkVectors, Span, Splitting, TokenisedText, check_work
from service.encoding.model import Model
from service.encoding.request import EncodeRequest, EncodeTask, RowOrError
from service.encoding.space import SPACE_HEADER
from service.errors import InvalidRequest, ServiceError
from service.http.fields import Body
from service.http.routing import Many
from service.runtime.onnx import Array
from service.tokenization.texts import Cut

_TOGETHER_BYTES = 16 * 1024 * 1024  # of token vectors in one request to the engine, at least two windows
_CHUNK_BYTES = 100  # of a chunk in an answer beside its numbers
_PIECE_CHARACTERS = 20_000
_BOTH = (contract.POOLED, contract.TOKEN_EMBEDDINGS)
_SAME = 1e-3  # largest difference between a model's vector and the mean of its token vectors, relative to the length
Place = Annotated[int, Field(ge=0, strict=True)]


def check_overlap(size: int, overlap: int) -> None:
    if overlap >= size:
        raise PydanticCustomError("overlap", "overlap={overlap} must be below size={size}", {"overlap": overlap, "size": size})


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
        check_overlap(self.size, self.overlap)
        return self


ChunksOfText = list[tuple[Chunk, Array]]
SplitText = tuple[TokenisedText, list[Chunk]]


@dataclass(frozen=True)
class ChunkAnswer:
    """The chunks of each text with their vectors, or the text's error. `n_tokens`: the tokens that the encoder has read."""

    rows: list[ChunksOfText | ServiceError]
    n_tokens: int
    space: str


async def embed_chunks(
    model: Model,
    texts: Sequence[str],
    how: Chunks,
    call: Call,
    *,
    prompt: str = "",
    dimensions: int | None = None,
    number_bytes: float = NUMBER_BYTES,
) -> ChunkAnswer:
    """Split texts and compute the vector of each chunk. The error of a text that cannot be split is raised, but if the request asks for
    errors by item, it is the text's row. `number_bytes`: the bytes of a number in the answer.
    """
    model.check_size(len(texts))
    if how.spans is not None and len(how.spans) != len(texts):
        raise InvalidRequest(f"`chunks.spans` has {len(how.spans)} lists for {len(texts)} inputs: send one for each", param="chunks.spans")
    for at, text in enumerate(texts):
        model.check_length(len(text), at)
    if how.mode == "late":
        await check_late(model, call)
    split: list[SplitText | ServiceError] = []
    for first, last in _pieces(texts):
        work = partial(_split_all, model, texts, range(first, last), prompt, how, by_item=call.item_errors)
        split += await model.tokenizers.run(work, size=sum(map(len, texts[first:last])), client=call.client)
    good = [each for each in split if not isinstance(each, ServiceError)]
    chunks = [chunk for _, chunks in good for chunk in chunks]
    check_work(len(chunks), sum(chunk.tokens[1] - chunk.tokens[0] for chunk in chunks))
    width = dimensions or model.manifest.width
    what = f"{len(chunks)} chunks of {width} numbers"
    model.reserve(call, len(chunks) * (width * number_bytes + _CHUNK_BYTES), what)
    before = call.tokens
    vectors = iter(await (_late(model, good, call, dimensions) if how.mode == "late" else _split_up(model, good, call, prompt, dimensions)))
    rows = [each if isinstance(each, ServiceError) else list(zip(each[1], next(vectors), strict=True)) for each in split]
    return ChunkAnswer(rows, call.tokens - before, call.headers.get(SPACE_HEADER, ""))


def _pieces(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of texts that are split at once: little enough that other clients' texts have their turns in between."""
    first, characters = 0, 0
    for at, text in enumerate(texts):
        if characters and characters + len(text) > _PIECE_CHARACTERS:
            yield first, at
            first, characters = at, 0
        characters += len(text)
    yield first, len(texts)


def _split_all(
    model: Model, texts: Sequence[str], places: range, prompt: str, how: Chunks, *, by_item: bool
) -> list[SplitText | ServiceError]:
    split: list[SplitText | ServiceError] = []
    for at in places:
        try:
            split.append(_split(model, texts[at], prompt, at, how, None if how.spans is None else how.spans[at]))
        except ServiceError as error:
            if not by_item:
                raise
            split.append(error)
    return split


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
        answer = await model.answer(request, call)
        await asyncio.to_thread(_add, vectors, [at for at, _ in some], answer.rows)
    return await asyncio.to_thread(lambda: [each.all() for each in vectors])


def _add(vectors: Sequence[ChunkVectors], places: Sequence[int], rows: Sequence[RowOrError]) -> None:
    for at, row in zip(places, rows, strict=True):
        if isinstance(row, ServiceError):
            raise row
        vectors[at].add(row[0])


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
        (encoded,) = model.texts.encode(["a few words"], cut=Cut())
        if model.manifest.pooling != "mean" or isinstance(encoded, ServiceError):
            model.gives_means = False
        else:
            (row,) = await model.engine.run(EncodeTask(inputs=[encoded], outputs=_BOTH, **call.origin))
            if isinstance(row, ServiceError):
                raise row
            model.gives_means = _is_mean(*row)
    if not model.gives_means:
        raise InvalidRequest(
            f"model {model.name} makes the vector of a text by {model.manifest.pooling} pooling, perhaps with layers after it, so parts of "
            'a text have no vectors in it: use mode "split", or a model with mean pooling alone',
            param="chunks.mode",
        )


def _is_mean(pooled: Array, tokens: Array) -> bool:
    mean = tokens.mean(axis=0)
    return mean.shape == pooled.shape and float(np.linalg.norm(mean - pooled)) <= _SAME * float(np.linalg.norm(pooled))
