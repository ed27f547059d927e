"""Stores conversations. A conversation has a list of items, and the state after its latest response.

The state has seen the items up to the end of that response. The next response begins at the state. It reads the items that were added
later, and then its own input. It reads all items again if the state is gone or is of another model. It also does so if the conversation
has no state, since an item was deleted, or since the conversation was changed while its latest response was generated.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import orjson

from service.call import Call
from service.catalog import Catalog
from service.dialects.openai.responses.items import Item, listed_item
from service.dialects.openai.responses.schemas import ITEMS, InputItem, ResponseRequest
from service.dialects.states.finding import on_store
from service.dialects.text.request import Beginning, TextCall, beginning_of
from service.errors import InvalidRequest, ServiceError, StateGone, StateNotFound
from service.states.engine import StateEngine
from service.states.record import Document, Quota

MOST_ITEMS = 4096
MOST_BYTES = 2**25  # limit on a conversation's size, since each change reads and writes the whole conversation
_KIND = "conversation"


class ConversationNotFound(ServiceError):
    """The tenant has no conversation with this id, or the conversation has no such item."""

    status = 404
    code = "conversation_not_found"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A stored conversation, with its items and the state that has seen them."""

    tenant: str
    id: str
    created_at: int
    metadata: dict[str, str]
    items: list[dict[str, Any]] = field(default_factory=list)  # the JSON items that clients can list
    state: str | None = None  # id of the state after the first `seen` items
    seen: int = 0
    version: int = 0
    size: int = 0  # bytes in the store when it was read

    @classmethod
    def of(cls, document: Document) -> Self:
        rest: dict[str, Any] = {"tenant": document.tenant, "id": document.id, "version": document.version, "size": len(document.body)}
        return cls(**orjson.loads(document.body), **rest)

    def json(self) -> dict[str, Any]:
        return {"id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata}

    def after(self, new: Sequence[dict[str, Any]]) -> Self:
        """Return the conversation with the items `new` appended. Raises InvalidRequest if it would have too many items or bytes."""
        if (count := len(self.items) + len(new)) > MOST_ITEMS:
            raise InvalidRequest(
                f"the conversation would have {count} items, and the most is {MOST_ITEMS}: begin another one",
                param="items",
            )
        if (size := self.size + len(orjson.dumps(new))) > MOST_BYTES:
            raise InvalidRequest(
                f"the conversation would have {size} bytes, and the most is {MOST_BYTES}: begin another one",
                param="items",
            )
        return replace(self, items=[*self.items, *new])

    def without(self, item: str) -> Self:
        """Return the conversation without an item. Drop the state too, which may have seen the item. Raises ConversationNotFound."""
        self.item(item)
        return replace(self, items=[each for each in self.items if each["id"] != item], state=None, seen=0)

    def item(self, item: str) -> dict[str, Any]:
        """Return the item with this id. Raises ConversationNotFound."""
        for each in self.items:
            if each["id"] == item:
                return each
        raise ConversationNotFound(f"Item with id '{item[:100]}' not found in the conversation.", param="item_id")


def new_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the JSON of the items, with new random ids, as clients can list them."""
    return [listed_item(item, secrets.token_hex(24)) for item in items]


# Functions that run on the store's thread ------------------------------------------------------------------------------------------------


def find(engine: StateEngine, tenant: str, conversation: str, param: str = "conversation_id") -> Conversation:
    """Return a conversation of the tenant. Raises ConversationNotFound if the tenant has none with this id. The error does not show whether
    another tenant has one."""
    try:
        return Conversation.of(engine.read(tenant, _KIND, conversation))
    except StateNotFound:
        raise ConversationNotFound(f"Conversation with id '{conversation[:100]}' not found.", param=param) from None


def write(engine: StateEngine, conversation: Conversation, quota: Quota, ttl_s: float) -> Conversation:
    """Write a conversation, and return it with its new version. Raises DocumentMoved if the stored one has another version."""
    document = _document(conversation, time.time() + ttl_s)
    return replace(conversation, version=engine.write(document, conversation.version, quota))


def _document(conversation: Conversation, expires: float | None) -> Document:
    names = ("created_at", "metadata", "items", "state", "seen")
    body = orjson.dumps({name: getattr(conversation, name) for name in names})
    return Document(kind=_KIND, id=conversation.id, tenant=conversation.tenant, body=body, expires=expires)


def erase(engine: StateEngine, tenant: str, conversation: str) -> None:
    """Delete a conversation. Raises ConversationNotFound."""
    find(engine, tenant, conversation)
    engine.erase(tenant, _KIND, conversation, None)


def append(
    engine: StateEngine,
    response: Document,
    conversation: str,
    before: int,
    items: Sequence[dict[str, Any]],
    state: str | None,
    quota: Quota,
) -> None:
    """Write a response, which has the version `response.version` now, and append `items`, its input and output, to its conversation: both
    or nothing. If the conversation was deleted, only the response is written. The conversation then expires with the response.

    `state` is the state after the response. It becomes the conversation's state if the conversation still has the version `before`, with
    which the response began. Otherwise the conversation was changed meanwhile, for example by added items, and it gets no state. Raises
    DocumentMoved if the stored response has another version, or if the conversation is changed at the same time.
    """
    try:
        found = find(engine, response.tenant, conversation)
    except ConversationNotFound:
        engine.write(response, response.version, quota)
        return
    grown = found.after(items)
    alone = found.version == before
    grown = replace(grown, state=state if alone else None, seen=len(grown.items) if alone else 0)
    engine.write_all([(response, response.version), (_document(grown, response.expires), found.version)], quota)


# The beginning of a response --------------------------------------------------------------------------------------------------------------


async def continued(body: ResponseRequest, catalog: Catalog, call: Call) -> tuple[ResponseRequest, Beginning | None, int]:
    """Return three values: the request, the state at which the response begins or None, and the conversation's version.

    The request's input is preceded by the conversation's items that the state has not seen, or by all items if there is no state. Raises
    ConversationNotFound, or InvalidRequest if the conversation would have too many items or bytes.
    """
    found = await on_store(catalog, call, find, body.conversation_id or "", "conversation")
    own = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    found.after([*new_items(own), {}])
    begin = None
    if found.state is not None:
        try:
            begin = await beginning_of(catalog, call, found.state, body.exact, "conversation")
            TextCall.of(body.model, begin, call, catalog)
        except (StateNotFound, StateGone, InvalidRequest):  # InvalidRequest: the state is of another model
            begin = None
    unseen = ITEMS.validate_python(found.items[found.seen if begin else 0 :])
    return body.model_copy(update={"input": [*unseen, *own], "conversation": None}), begin, found.version
