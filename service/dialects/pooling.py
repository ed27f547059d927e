"""vLLM's route `/pooling`: a text's vector, the vectors of its tokens, or the class scores of its tokens. Errors have OpenAI's form.

Source: vLLM's protocol of pooling. `token_embed` sends the token matrix of a model that has one, else the vectors of all tokens.
Addition: `input_type`.
"""

import base64
import time
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field, StrictBool, StrictInt

from export import contract
from service.dialects.input_types import InputType, as_role
from service.dialects.openai.embeddings import ERRORS, OpenAIUsage, TokenId, as_inputs
from service.dialects.text.schemas import VLLM, VLLM_IGNORED
from service.encoding import vectors
from service.encoding.model import Model
from service.encoding.request import EncodeRequest
from service.errors import InvalidRequest, ServiceError
from service.http.fields import EMPTY, Body, unsupported_fields
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many
from service.runtime.onnx import Array
from service.tokenization.texts import Cut

Task = Literal["embed", "token_embed", "token_classify"]


class PoolingRequest(Body):
    ignored = VLLM_IGNORED | {"user"}
    unsupported = unsupported_fields(
        VLLM,
        "cache_salt chat_template chat_template_kwargs continue_final_message add_generation_prompt messages data softmax activation",
        embed_dtype=(EMPTY, "float32"),
        endianness=(EMPTY, "native", "little"),
        add_special_tokens=(True,),
    )

    input: str | Many[str] | Many[TokenId] | Many[str | Many[TokenId]] = Field(description="Texts or token ids, as of /v1/embeddings.")
    model: str | None = Field(None, max_length=256, description="Name or alias of a served encoder or token classifier.")
    task: Task = Field("embed", description="embed: one vector. token_embed: one for each token. token_classify: class scores of each.")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian float32 of all numbers.")
    dimensions: int | None = Field(None, ge=1, le=65_536, strict=True, description="Keep so many, then bring vectors back to length 1.")
    input_type: InputType | None = Field(None, description="Writes each text as the checkpoint writes queries, or documents.")
    use_activation: StrictBool = Field(True, description="False: logits in place of class scores; with embed, the vector as it was pooled.")
    truncate_prompt_tokens: StrictInt | None = Field(None, ge=-1, lt=2**31, description="Cut to so many tokens; -1: to the model's limit.")


class Pooled(BaseModel):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PoolingResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: OpenAIUsage


router = APIRouter(route_class=JsonRoute, tags=["vLLM"], responses=ERRORS)


@router.post("/pooling", response_model=PoolingResponse)
async def pooling(body: PoolingRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return vectors or class scores of each text, as `task` says."""
    call.item_errors = False  # the answer has no place for errors of texts
    model = catalog.get(body.model, "token_classifier" if body.task == "token_classify" else "encoder")
    output, inputs, limit = _output(body, model), as_inputs(body.input), body.truncate_prompt_tokens
    queries, prompt = as_role(model, len(inputs), body.input_type)
    request = EncodeRequest(
        inputs=inputs,
        outputs=(output,),
        cut=model.default_cut(True if limit else None) if limit is None or limit < 1 else Cut(max_tokens=limit),
        queries=queries,
        prompt=prompt,
        row_width=body.dimensions,
        number_bytes=vectors.NUMBER_BYTES[body.encoding_format],
    )
    answer = await model.answer(request, call)
    data = []
    for index, row in enumerate(answer.rows):
        assert not isinstance(row, ServiceError), "errors by item are off"
        numbers = np.ascontiguousarray(_sent(row[0], body, model), "<f4")
        content = list(numbers) if numbers.ndim == 2 else numbers
        shown = content if body.encoding_format == "float" else base64.b64encode(numbers.tobytes()).decode()
        data.append({"index": index, "object": "pooling", "data": shown})
    return {
        "id": f"pool-{call.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": data,
        "usage": {"prompt_tokens": answer.n_tokens, "total_tokens": answer.n_tokens},
    }


def _output(body: PoolingRequest, model: Model) -> str:
    """Return the graph's output for the request's task. Raises InvalidRequest for dimensions that it has not."""
    if body.task == "token_classify":
        if body.dimensions is not None:
            raise InvalidRequest("class scores have no `dimensions`: leave them out", param="dimensions")
        return contract.LOGITS
    if body.task == "embed":
        output = model.tensors(["dense"], normalize=body.use_activation, param="task")[0]
    else:
        output = contract.MULTIVECTOR if "multivector" in model.manifest.outputs else contract.TOKEN_EMBEDDINGS
    widths = {tensor.name: tensor.shape[-1] for tensor in model.manifest.graph.outputs}
    vectors.check_dimensions(body.dimensions, int(widths[output]))
    return output


def _sent(row: Array, body: PoolingRequest, model: Model) -> Array:
    if body.task == "embed":
        return vectors.cut(row, body.dimensions, normalize=body.use_activation)
    if body.task == "token_embed":
        return np.stack([vectors.cut(each.astype(np.float32), body.dimensions, normalize=True) for each in row])
    if not body.use_activation or model.manifest.score_activation == "identity":
        return row
    if model.manifest.score_activation == "sigmoid":
        sigmoid: Array = np.exp(-np.logaddexp(0.0, -row))
        return sigmoid
    powers: Array = np.exp(row - row.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers
