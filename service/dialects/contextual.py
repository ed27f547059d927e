"""The route `/v1/contextualizedembeddings` of Voyage and Perplexity: vectors of chunks that know the document around them.

Sources: the API references of both. A document is a list of its chunks, which are read joined by spaces; with `enable_auto_chunk` this one
text is split anew. A query is a document of one chunk. Errors have OpenAI's form.
"""

import asyncio
import base64
from typing import Annotated, Any, Literal, Self

import numpy as np
from fastapi import APIRouter
from pydantic import AliasChoices, BaseModel, Field, StrictBool, model_validator

from service.dialects.chunks import Chunks, check_overlap, embed_chunks
from service.dialects.input_types import prompt_of
from service.dialects.openai.embeddings import ERRORS
from service.encoding import vectors
from service.encoding.chunks import joined
from service.errors import EmptyInput
from service.http.fields import Body
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many

_NAMED: dict[str, vectors.Form] = {"base64_int8": "int8", "base64_binary": "binary"}  # Perplexity's formats name the type of a number


class ContextualRequest(Body):
    ignored = frozenset(("user",))

    inputs: Annotated[Many[Annotated[Many[str], Field(min_length=1)]], Field(min_length=1)] = Field(
        validation_alias=AliasChoices("inputs", "input"), description="The documents, each as the list of its chunks."
    )
    model: str | None = Field(None, max_length=256, description="Name or alias of a served encoder.")
    input_type: Literal["query", "document"] | None = Field(None, description="Puts the checkpoint's prompt for it before each document.")
    dimensions: int | None = Field(
        None, ge=1, le=65_536, strict=True, validation_alias=AliasChoices("output_dimension", "dimensions"), description="Keep so many."
    )
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] = Field("float", description="Type of a number.")
    encoding_format: Literal["base64", "base64_int8", "base64_binary", "float"] | None = Field(
        None, description="base64: the bytes of `output_dtype`, little-endian. base64_int8 and base64_binary name the type too."
    )
    enable_auto_chunk: StrictBool = Field(False, description="Split each document, joined to one text, by `chunk_size`.")
    chunk_size: int = Field(256, ge=1, le=1_000_000, strict=True, description="Most tokens of a chunk.")
    chunk_overlap: int = Field(0, ge=0, strict=True, description="Most tokens that a chunk repeats of the chunk before.")

    @model_validator(mode="after")
    def _moves_on(self) -> Self:
        check_overlap(self.chunk_size, self.chunk_overlap)
        return self


class ContextualEmbedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[int] | str
    text: str | None = Field(None, description="With `enable_auto_chunk`: the text of the chunk.")


class ContextualDocument(BaseModel):
    object: Literal["list"]
    index: int
    data: list[ContextualEmbedding]


class ContextualUsage(BaseModel):
    total_tokens: int


class ContextualResponse(BaseModel):
    object: Literal["list"]
    data: list[ContextualDocument]
    model: str
    usage: ContextualUsage


router = APIRouter(route_class=JsonRoute, tags=["Voyage"], responses=ERRORS)


@router.post("/v1/contextualizedembeddings", response_model=ContextualResponse, response_model_exclude_none=True)
async def contextualized(body: ContextualRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return a vector for each chunk of each document. Each document is read as a whole."""
    model = catalog.get(body.model, "encoder")
    form = _NAMED.get(body.encoding_format or "", body.output_dtype)
    vectors.check_dimensions(body.dimensions, model.manifest.width, "output_dimension")
    vectors.check_bits(form, body.dimensions or model.manifest.width)
    call.item_errors = False  # the answer has no place for errors of documents
    for at, chunks in enumerate(body.inputs):
        if not all(chunks):
            raise EmptyInput(f"inputs[{at}] has an empty chunk: leave it out", param="inputs")
    whole = [joined(chunks) for chunks in body.inputs]
    texts = [text for text, _ in whole]
    how: dict[str, Any] = {"size": body.chunk_size, "overlap": body.chunk_overlap}
    if not body.enable_auto_chunk:
        how = {"spans": [spans for _, spans in whole]}
    prompt = prompt_of(model, body.input_type)
    if body.input_type is None:
        model.warn_of_roles(call)
    each = vectors.NUMBER_BYTES[form]
    answer = await embed_chunks(
        model, texts, Chunks.model_validate(how), call, prompt=prompt, dimensions=body.dimensions, number_bytes=each
    )

    def sent(vector: Any) -> Any:
        formed = vectors.FORMS[form](vectors.cut(vector, body.dimensions, normalize=True))
        if body.encoding_format in (None, "float"):
            return formed
        return base64.b64encode(np.ascontiguousarray(formed).tobytes()).decode()

    def document(index: int, text: str, row: Any) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for at, (chunk, vector) in enumerate(row):
            shown = {"text": text[slice(*chunk.characters)]} if body.enable_auto_chunk else {}
            items.append({"object": "embedding", "index": at, "embedding": sent(vector), **shown})
        return {"object": "list", "index": index, "data": items}

    data = await asyncio.to_thread(lambda: list(map(document, range(len(texts)), texts, answer.rows)))  # no row is an error
    return {"object": "list", "data": data, "model": model.name, "usage": {"total_tokens": answer.n_tokens}}
