"""vLLM's routes `/tokenize` and `/detokenize`, for the prompts of a decoder.

text-embeddings-inference has another `/tokenize` on the same path. A body with `prompt` or `messages` is treated as vLLM's, any
other body as text-embeddings-inference's. The answer or error has the format of the same project.
"""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field, StrictBool

from service.call import Call
from service.catalog import Catalog
from service.dialects.openai import embeddings as openai
from service.dialects.openai.chat import messages_of
from service.dialects.tei import tokens as tei_tokens
from service.dialects.tei.schemas import TeiError, TeiToken, TeiTokenizeRequest
from service.dialects.text.request import TextCall
from service.dialects.text.schemas import ChatMessage, TokenId
from service.errors import InvalidRequest, ServiceError
from service.http.fields import Fields, schema_of, unsupported_fields
from service.http.gate import refused
from service.http.routing import CallDep, CatalogDep, ContentDep, JsonRoute, Many, read


class TokenizeRequest(Fields):
    unsupported = unsupported_fields("continue_final_message chat_template chat_template_kwargs mm_processor_kwargs tools")

    model: str | None = Field(None, max_length=256, description="Name or alias of a served model; the first decoder without it.")
    prompt: str | None = None
    messages: Annotated[Many[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: StrictBool | None = Field(None, description="True without it for a prompt; a chat template writes its own.")
    add_generation_prompt: StrictBool = Field(True, description="Of messages: up to where the answer begins.")
    return_token_strs: StrictBool = False


class VllmTokens(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Fields):
    model: str | None = Field(None, max_length=256, description="Name or alias of a served model; the first decoder without it.")
    tokens: Many[TokenId]


class Detokenized(BaseModel):
    prompt: str


class _TokensKind(BaseModel):
    """The fields that distinguish vLLM's body from text-embeddings-inference's."""

    inputs: Any = None
    prompt: Any = None
    messages: Any = None


_BODY = {
    "content": {"application/json": {"schema": {"anyOf": [schema_of(TeiTokenizeRequest), schema_of(TokenizeRequest)]}}},
    "required": True,
}
_STATUSES = (400, 401, 404, 413, 422, 424, 429, 500, 503, 504)
_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": TeiError | openai.OpenAIErrorResponse} for status in _STATUSES}
router = APIRouter(route_class=JsonRoute)
_ID_BYTES, _STRING_BYTES = 7, 24  # estimated bytes in JSON of a token's id, and of its string


@router.post(
    "/tokenize",
    response_model=list[list[TeiToken]] | VllmTokens,
    responses=_ERRORS,
    openapi_extra={"requestBody": _BODY},
    tags=["text-embeddings-inference", "OpenAI"],
)
async def tokenize(content: ContentDep, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the tokens of a prompt or a conversation (vLLM's body), or of each text (text-embeddings-inference's body)."""
    glance = read(_TokensKind, content, call)
    await asyncio.sleep(0)  # let other tasks run before a large body is parsed again
    empty = not (glance.prompt or glance.messages)  # text-embeddings-inference's clients may send these two fields empty
    if empty and (glance.inputs is not None or (glance.prompt is None and glance.messages is None)):
        return await tei_tokens.tokenize(read(TeiTokenizeRequest, content, call), call, catalog)
    try:
        return await _tokens(read(TokenizeRequest, content, call), call, catalog)
    except ServiceError as error:  # on this path, a raised error would get text-embeddings-inference's format
        return refused(error, openai.DIALECT)


async def _tokens(body: TokenizeRequest, call: Call, catalog: Catalog) -> dict[str, Any]:
    text = TextCall.of(body.model, None, call, catalog)
    model = text.model
    if body.prompt is not None and body.messages is not None:
        raise InvalidRequest("prompt and messages cannot be combined", param="messages")
    if body.messages is not None:
        if body.add_special_tokens:
            raise InvalidRequest("a chat template writes its own special tokens", param="add_special_tokens")
        messages = messages_of(body.messages)
        opened = body.add_generation_prompt
        ids = await text.messages(messages, None, "messages", add_generation_prompt=opened, generates=False)
    else:
        added = body.add_special_tokens is not False
        ids = await text.encode(body.prompt or "", "prompt", add_special_tokens=added, generates=False)
    catalog.expect(call, len(ids) * (_STRING_BYTES if body.return_token_strs else _ID_BYTES), f"{len(ids)} tokens")
    strings: Any = (model.tokenizer.id_to_token(token_id) for token_id in ids) if body.return_token_strs else None
    if strings is not None and not call.answer_bytes:  # strings of a large answer are decoded when they are sent
        strings = list(strings)
    return {"count": len(ids), "max_model_len": model.max_context, "tokens": ids, "token_strs": strings}


@router.post("/detokenize", response_model=Detokenized, responses=openai.ERRORS, tags=["OpenAI"])
async def detokenize(body: DetokenizeRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the text of token ids, including the text of special tokens."""
    text = TextCall.of(body.model, None, call, catalog)
    text.check_ids(body.tokens, "tokens")
    return {"prompt": await catalog.tokenizers.run(lambda: text.model.decode(body.tokens), size=len(body.tokens), client=call.client)}
