"""The routes `/v1/conversations` of OpenAI. A conversation is a list of items, which a response with the field `conversation` continues."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field, StrictBool

from service.call import Call
from service.catalog import Catalog
from service.dialects.openai.responses import conversations as stored
from service.dialects.openai.responses.conversations import Conversation, new_items
from service.dialects.openai.responses.items import PageDep
from service.dialects.openai.responses.schemas import Item, ItemList, ListedItem
from service.dialects.states.finding import on_store, store_of
from service.dialects.states.options import Metadata
from service.dialects.states.records import list_json, quota_of
from service.dialects.states.schemas import ERRORS, json_body
from service.dialects.text.answer import new_id
from service.http.fields import Fields
from service.http.routing import CallDep, CatalogDep, ContentDep, JsonRoute, Many, json_response, read
from service.states.engine import StateEngine

ConversationPath = Annotated[str, Path(description="Id of a conversation.")]
ItemPath = Annotated[str, Path(description="Id of an item.")]

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


class CreateConversation(Fields):
    items: Many[Item] = Field([], max_length=20, description="Up to 20 messages, tool calls and their outputs.")
    metadata: Metadata = Field({})


class ChangeConversation(Fields):
    metadata: Metadata = Field(description="Replaces all metadata.")


class AddItems(Fields):
    items: Many[Item] = Field(min_length=1, max_length=20)


class ConversationObject(BaseModel):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(BaseModel):
    id: str
    object: Literal["conversation.deleted"]
    deleted: StrictBool


@router.post("/v1/conversations", response_model=ConversationObject, openapi_extra=json_body(CreateConversation))
async def create(content: ContentDep, call: CallDep, catalog: CatalogDep) -> Any:
    """Create a conversation. The body may contain its first items."""
    body = read(CreateConversation, content or b"{}")
    new = Conversation(
        tenant=call.tenant_name,
        id=new_id("conv_"),
        created_at=int(time.time()),
        metadata=body.metadata,
        items=new_items(body.items),
    )
    quota, ttl_s = quota_of(catalog.settings), catalog.settings.state_ttl_s
    made = await store_of(catalog).call(lambda engine: stored.write(engine, new, quota, ttl_s))
    return json_response(made.json(), call)


@router.get("/v1/conversations/{conversation_id}", response_model=ConversationObject)
async def conversation(conversation_id: ConversationPath, call: CallDep, catalog: CatalogDep) -> Any:
    """Return a conversation without its items."""
    return json_response((await _found(conversation_id, call, catalog)).json(), call)


@router.post("/v1/conversations/{conversation_id}", response_model=ConversationObject, openapi_extra=json_body(ChangeConversation))
async def change(conversation_id: ConversationPath, content: ContentDep, call: CallDep, catalog: CatalogDep) -> Any:
    """Replace the metadata of a conversation."""
    body = read(ChangeConversation, content)
    changed = await _changed(conversation_id, lambda found: replace(found, metadata=body.metadata), call, catalog)
    return json_response(changed.json(), call)


@router.delete("/v1/conversations/{conversation_id}", response_model=ConversationDeleted)
async def delete(conversation_id: ConversationPath, call: CallDep, catalog: CatalogDep) -> Any:
    """Delete a conversation and its items. Its responses and their states are not deleted."""
    await on_store(catalog, call, stored.erase, conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True}, call)


@router.get("/v1/conversations/{conversation_id}/items", response_model=ItemList)
async def items(conversation_id: ConversationPath, call: CallDep, catalog: CatalogDep, page: PageDep) -> Any:
    """List the items of a conversation."""
    return json_response(page.of((await _found(conversation_id, call, catalog)).items), call)


@router.post("/v1/conversations/{conversation_id}/items", response_model=ItemList, openapi_extra=json_body(AddItems))
async def add(conversation_id: ConversationPath, content: ContentDep, call: CallDep, catalog: CatalogDep) -> Any:
    """Append items to a conversation, and return them. The next response reads these items before its own input."""
    new = new_items(read(AddItems, content).items)
    await _changed(conversation_id, lambda found: found.after(new), call, catalog)
    return json_response(list_json(new, has_more=False), call)


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", response_model=ListedItem)
async def item(conversation_id: ConversationPath, item_id: ItemPath, call: CallDep, catalog: CatalogDep) -> Any:
    """Return one item of a conversation."""
    return json_response((await _found(conversation_id, call, catalog)).item(item_id), call)


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", response_model=ConversationObject)
async def delete_item(conversation_id: ConversationPath, item_id: ItemPath, call: CallDep, catalog: CatalogDep) -> Any:
    """Delete an item of a conversation. The next response reads all remaining items again, since the conversation's state has seen the
    deleted item."""
    changed = await _changed(conversation_id, lambda found: found.without(item_id), call, catalog)
    return json_response(changed.json(), call)


async def _found(conversation: str, call: Call, catalog: Catalog) -> Conversation:
    return await on_store(catalog, call, stored.find, conversation)


async def _changed(conversation: str, change: Callable[[Conversation], Conversation], call: Call, catalog: Catalog) -> Conversation:
    """Apply `change` to the stored conversation, write the result, and return it."""
    quota, ttl_s = quota_of(catalog.settings), catalog.settings.state_ttl_s

    def changed(engine: StateEngine, tenant: str) -> Conversation:
        return stored.write(engine, change(stored.find(engine, tenant, conversation)), quota, ttl_s)

    return await on_store(catalog, call, changed)
