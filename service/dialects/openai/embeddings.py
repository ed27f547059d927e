"""The route `/v1/embeddings` (also `/embeddings`) of OpenAI.

Source: the OpenAI API reference (CreateEmbeddingRequest) and openai-python, which requests base64 by default, and retries on
408, 409, 429 and 5xx after `retry-after-ms`. Additions: `prompt_name` and `prompt`, more encoding formats, `truncated` in the
answer, NDJSON.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import AliasChoices, BaseModel, Field, StrictBool, StrictInt

from service.call import Call
from service.dialects import arrow
from service.dialects.chunks import Chunks, ChunksOfText, embed_chunks
from service.dialects.input_types import InputType, JinaTask, as_role, prompt_of
from service.dialects.search_outputs import (
    AskedOutput,
    MatrixObject,
    MultiVectorOptions,
    SparseObject,
    SparseOptions,
    as_outputs,
    bytes_of,
    matrix_content,
    pooled,
    shortened,
    sparse_content,
)
from service.dialects.text.schemas import VLLM, VLLM_IGNORED
from service.encoding import sparse, vectors
from service.encoding.chunks import joined
from service.encoding.model import Model
from service.encoding.request import EncodeRequest, Row
from service.errors import EmptyInput, InvalidRequest, ServiceError
from service.http.dialect import Dialect
from service.http.fields import EMPTY, Body, unsupported_fields
from service.http.ndjson import stream, totals
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many
from service.tokenization.texts import Cut, Cutting, Input, Side

TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_SPARSE, _MULTIVECTOR = SparseOptions.model_validate({}), MultiVectorOptions.model_validate({})  # made once, for most requests


class EmbeddingRequest(Body):
    """The body of `/v1/embeddings`. Other keys than fields and `unsupported` ones are ignored, since some clients send more keys."""

    ignored = VLLM_IGNORED | {"additional_data"}
    unsupported = unsupported_fields(
        VLLM,
        "cache_salt chat_template chat_template_kwargs continue_final_message add_generation_prompt",
        messages=(),
        embed_dtype=(EMPTY, "float32"),
        endianness=(EMPTY, "native", "little"),
        output_dtype=(EMPTY, "float"),
        add_special_tokens=(True,),
        use_activation=(True,),
        normalized=(True,),
        truncation=(True,),
        modality=(EMPTY, "text"),
    )

    input: str | Many[str] | Many[TokenId] | Many[str | Many[TokenId]] = Field(
        description="A text, a list of texts, one text as token ids, or a list of texts and token id lists."
    )
    model: str | None = Field(None, max_length=256, description="Name or alias of a served model; the first encoder without it.")
    encoding_format: vectors.Form = Field("float", description="float, base64 (little-endian float32), int8, uint8, binary, ubinary.")
    embedding_type: vectors.Form | None = Field(None, description="Jina's name for `encoding_format`, which it replaces.")
    dimensions: int | None = Field(
        None,
        ge=1,
        le=65_536,
        strict=True,
        validation_alias=AliasChoices("dimensions", "output_dimension"),
        description="Keep this many dimensions, then bring the vector back to length 1.",
    )
    user: str | None = Field(None, description="Accepted and ignored.")
    input_type: InputType | None = Field(None, description="Writes each text as the checkpoint writes queries, or documents.")
    task: JinaTask | None = Field(None, description="Jina's name for `input_type`.")
    prompt_name: str | None = Field(None, max_length=256, description="A prompt of the checkpoint, put before each text.")
    prompt: str | None = Field(None, max_length=65_536, description="The same, given in full.")
    normalize: StrictBool = Field(True, description="False sends the vector as it was pooled.")
    outputs: Many[AskedOutput] | None = Field(None, description="What each item has, from one run; the model's first output without it.")
    sparse: SparseOptions = Field(default_factory=lambda: _SPARSE, description="The form of sparse vectors.")
    multivector: MultiVectorOptions = Field(default_factory=lambda: _MULTIVECTOR, description="The form of token matrices.")
    late_chunking: StrictBool = Field(False, description="Jina's: read all inputs, joined to one text, and send a vector for each.")
    return_multivector: StrictBool = Field(False, description="Jina's: send `embeddings`, a vector for each token.")
    chunks: Chunks | None = Field(None, description="Split each text into chunks, and send a vector for each.")
    truncate: StrictBool | Side | None = Field(None, description="right or true, left, none or false; the service's setting without it.")
    truncate_prompt_tokens: StrictInt | None = Field(
        None, ge=-1, lt=2**31, description="vLLM's: cut each input to this many tokens; -1 to the model's own limit. 0 is the same as none."
    )

    @property
    def role(self) -> str | None:
        return self.input_type or self.task

    @property
    def not_a_table(self) -> bool:
        return self.chunks is not None or self.late_chunking or self.return_multivector

    @property
    def form(self) -> vectors.Form:
        return self.embedding_type or self.encoding_format


class ChunkObject(BaseModel):
    index: int
    embedding: list[float] | list[int] | str
    characters: list[int] = Field(
        min_length=2, max_length=2, description="The first character of the chunk in its text, and the one after its last."
    )
    tokens: list[int] = Field(min_length=2, max_length=2, description="The same in tokens, without special tokens and those of a prompt.")


class EmbeddingObject(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[int] | str | None = Field(
        None, description="Null where `error` says why, on requests with x-item-errors, and where `outputs` has no dense."
    )
    sparse: SparseObject | None = None
    multivector: MatrixObject | list[list[float]] | list[list[int]] | None = None
    embeddings: list[list[float] | list[int] | str] | None = Field(None, description="With `return_multivector`: one for each token.")
    chunks: list[ChunkObject] | None = None
    error: dict[str, Any] | None = None


class OpenAIUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    system_fingerprint: str = Field(description="The embedding space of the vectors, one for each of `outputs`, separated by commas.")
    usage: OpenAIUsage
    truncated: list[Cutting] = Field(
        [], description="The inputs that were cut, with their tokens before (of a long text: at least) and after."
    )


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorResponse(BaseModel):
    error: ErrorDetail


_TYPES = {
    401: "authentication_error",
    404: "invalid_request_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# OpenAI answers 400 to every invalid request, and never uses 422 or 424.
_STATUS = {422: 400, 424: 400}


def render(error: ServiceError) -> tuple[int, Any]:
    status = _STATUS.get(error.status, error.status)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


DIALECT = Dialect("openai", ("/v1", "/embeddings", "/pooling"), render)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": OpenAIErrorResponse} for status in (400, 401, 404, 413, 429, 500, 503, 504)}
router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/embeddings", response_model=EmbeddingResponse)
@router.post("/embeddings", response_model=EmbeddingResponse)  # for clients whose base URL has no /v1, as in text-embeddings-inference
async def embeddings(body: EmbeddingRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return a vector for each input. `outputs` names what else a text gives. With `Accept: application/x-ndjson`, each item is sent as a
    line as soon as it is computed; with `application/vnd.apache.arrow.stream`, all are a table."""
    model = catalog.get(body.model, "encoder")
    outputs = _outputs(body, model)
    if call.arrow:
        arrow.check_formats(call, body.form, body.multivector.dtype, chunks=body.not_a_table)
        await asyncio.to_thread(arrow.load_pyarrow)  # before anything is computed
    if body.chunks is not None:
        return await _chunks(body, body.chunks, model, call)
    if body.late_chunking:
        return await _late(body, model, call)
    inputs = as_inputs(body.input)
    queries, prompt = as_role(model, len(inputs), body.role, prompt_name=body.prompt_name, prompt=body.prompt)
    request = EncodeRequest(
        inputs=inputs,
        outputs=model.tensors(outputs, normalize=body.normalize),
        bytes_by_output={} if body.return_multivector else bytes_of(model, body.multivector, arrow=call.arrow),
        cut=_cut(body, model),
        queries=queries,
        prompt=prompt,
        row_width=body.dimensions,
        number_bytes=4 if call.arrow else vectors.NUMBER_BYTES[body.form],
    )

    def entry(index: int, row: Any) -> dict[str, Any]:
        if isinstance(row, ServiceError):
            return {"object": "embedding", "index": index, "embedding": None, "error": render(row)[1]["error"]}
        content: dict[str, Any] = {"object": "embedding", "index": index}
        for output, array in zip(outputs, row, strict=True):
            if output == "dense":
                content["embedding"] = vectors.FORMS[body.form](vectors.cut(array, body.dimensions, normalize=body.normalize))
            elif output == "sparse":
                content["sparse"] = sparse_content(array, body.sparse, model)
            elif body.return_multivector:
                rows = [vectors.cut(each.astype(np.float32), body.dimensions, normalize=True) for each in array]
                content["embeddings"] = list(map(vectors.FORMS[body.form], rows))
            else:
                content["multivector"] = matrix_content(array, body.multivector)
        return content

    pool_factor = body.multivector.pool_factor if "multivector" in outputs and not queries else None  # queries are not pooled
    if call.ndjson:
        if pool_factor is not None:
            raise InvalidRequest("token matrices are pooled in one JSON answer only: leave NDJSON out", param="multivector.pool_factor")
        return await stream(model, request, call, entry, render)
    answer = await model.answer(request, call)
    if pool_factor is not None:
        answer.rows = await pooled(answer.rows, outputs.index("multivector"), pool_factor, item_errors=call.item_errors)
    if call.arrow:
        rows = [row if isinstance(row, ServiceError) else _numbers(body, outputs, row) for row in answer.rows]
        about = {"model": model.name, "space": answer.space, "prompt_tokens": str(answer.n_tokens)}
        return await arrow.table_answer(rows, outputs, about, call)
    entries = [entry(index, row) for index, row in enumerate(answer.rows)]
    return {"object": "list", "data": entries, "model": model.name, **totals(answer)}


def _outputs(body: EmbeddingRequest, model: Model) -> Sequence[AskedOutput]:
    """Return what each item has. Raises InvalidRequest for dimensions and number formats that an output cannot have."""
    outputs: Sequence[AskedOutput] = ["multivector"] if body.return_multivector else as_outputs(body.outputs, model)
    width = model.manifest.width
    if body.return_multivector:
        if body.outputs is not None or body.chunks is not None or body.late_chunking:
            raise InvalidRequest(
                "`return_multivector` gives token matrices alone: leave out outputs, chunks and late_chunking", param="return_multivector"
            )
        model.tensors(outputs, param="return_multivector")
        assert model.manifest.multivector is not None, "there is its output"
        width = model.manifest.multivector.width
    if body.return_multivector or "dense" in outputs:
        vectors.check_dimensions(body.dimensions, width)
        vectors.check_bits(body.form, body.dimensions or width)
    return outputs


def _numbers(body: EmbeddingRequest, outputs: Sequence[AskedOutput], row: Row) -> Row:
    """Return the numbers of a row that are sent, in the form of an engine's row."""
    forms: dict[AskedOutput, Callable[[Any], Any]] = {
        "dense": lambda array: vectors.cut(array, body.dimensions, normalize=body.normalize),
        "sparse": lambda array: sparse.cut(array, top_k=body.sparse.top_k, min_weight=body.sparse.min_weight),
        "multivector": lambda array: shortened(array, body.multivector),
    }
    return tuple([forms[output](array) for output, array in zip(outputs, row, strict=True)])


def _texts_of_chunks(body: EmbeddingRequest, call: Call, field: str) -> list[str]:
    """Return the inputs, which must be texts. Raises InvalidRequest if the request wishes what `field` cannot give."""
    inputs = as_inputs(body.input)
    texts = [text for text in inputs if isinstance(text, str)]
    if len(texts) < len(inputs):
        raise InvalidRequest(f"token ids cannot be split into chunks, as `{field}` needs: send texts", param="input")
    if call.ndjson or body.outputs not in (None, ["dense"]) or not body.normalize:
        raise InvalidRequest(
            f"`{field}`: chunks have dense vectors of length 1, in one JSON answer: leave the other wishes out", param=field
        )
    return texts


async def _late(body: EmbeddingRequest, model: Model, call: Call) -> dict[str, Any]:
    """Read all inputs as one text, and return a vector for each."""
    texts = _texts_of_chunks(body, call, "late_chunking")
    model.check_size(len(texts))
    for at, text in enumerate(texts):
        if not text:
            raise EmptyInput(f"input {at} cannot be empty", param="input")
    call.item_errors = False  # the inputs are one text
    whole, spans = joined(texts)
    how, prompt, each = Chunks.model_validate({"spans": [spans]}), _prompt(body, model, call), vectors.NUMBER_BYTES[body.form]
    answer = await embed_chunks(model, [whole], how, call, prompt=prompt, dimensions=body.dimensions, number_bytes=each)
    (row,) = answer.rows
    assert not isinstance(row, ServiceError), "errors by item are off"
    entries = [
        {"object": "embedding", "index": at, "embedding": vectors.FORMS[body.form](vectors.cut(vector, body.dimensions, normalize=True))}
        for at, (_, vector) in enumerate(row)
    ]
    usage = {"prompt_tokens": answer.n_tokens, "total_tokens": answer.n_tokens}
    return {"object": "list", "data": entries, "model": model.name, "system_fingerprint": answer.space, "usage": usage}


def _prompt(body: EmbeddingRequest, model: Model, call: Call) -> str:
    """Return the prompt before each text that is split, and warn if the request chose no role."""
    if body.role is None and not body.prompt_name and body.prompt is None:
        model.warn_of_roles(call)
    return prompt_of(model, body.role, prompt_name=body.prompt_name, prompt=body.prompt)


async def _chunks(body: EmbeddingRequest, how: Chunks, model: Model, call: Call) -> dict[str, Any]:
    texts = _texts_of_chunks(body, call, "chunks")
    each = vectors.NUMBER_BYTES[body.form]
    prompt = _prompt(body, model, call)
    answer = await embed_chunks(model, texts, how, call, prompt=prompt, dimensions=body.dimensions, number_bytes=each)

    def entry(row: ChunksOfText | ServiceError) -> dict[str, Any]:
        if isinstance(row, ServiceError):
            return {"error": render(row)[1]["error"]}
        return {
            "chunks": [
                {
                    "index": at,
                    "embedding": vectors.FORMS[body.form](vectors.cut(vector, body.dimensions, normalize=True)),
                    "characters": chunk.characters,
                    "tokens": chunk.tokens,
                }
                for at, (chunk, vector) in enumerate(row)
            ]
        }

    entries = await asyncio.to_thread(
        lambda: [{"object": "embedding", "index": index, **entry(row)} for index, row in enumerate(answer.rows)]
    )
    usage = {"prompt_tokens": answer.n_tokens, "total_tokens": answer.n_tokens}
    return {"object": "list", "data": entries, "model": model.name, "system_fingerprint": answer.space, "usage": usage}


def as_inputs(value: str | list[Any]) -> list[Input]:
    """Return the list of inputs in `value`. A text or a list of token ids is one input; any other list contains several inputs."""
    if isinstance(value, str):
        return [value]
    return [value] if value and isinstance(value[0], int) else value


def _cut(body: EmbeddingRequest, model: Model) -> Cut:
    """Return how a request truncates its texts. `truncate_prompt_tokens` implies truncation; `truncate` can set its side."""
    if not (limit := body.truncate_prompt_tokens):
        return as_cut(body.truncate, model)
    cut = as_cut(True if body.truncate is None else body.truncate, model)
    return cut if limit < 0 else Cut(side=cut.side, max_tokens=limit)


def as_cut(truncate: bool | Side | None, model: Model) -> Cut:
    return model.default_cut(truncate) if truncate is None or isinstance(truncate, bool) else Cut(side=truncate)
