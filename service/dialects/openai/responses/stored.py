"""Stores responses. Each response is one document of the store, and so is each idempotency key.

Every write names the version of the document that the process knows. So if two processes write, the first succeeds, and the second fails
and learns that it does not own the response.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import orjson

from service.dialects.openai.responses import conversations
from service.dialects.openai.responses.answer import ENDED, Answer, Said
from service.errors import InvalidRequest, KeyReused, ServiceError, StateNotFound
from service.http.answers import whole
from service.states.engine import StateEngine
from service.states.record import Document, IdempotencyKey, Quota

KIND, KEY_KIND = "response", "response_key"
CONTINUABLE = ("completed", "incomplete")
_KEY_S = 86_400.0  # seconds for which an idempotency key is stored


class ResponseNotFound(ServiceError):
    """The tenant has no response with this id."""

    status = 404
    code = "response_not_found"


class PreviousResponseNotFound(ServiceError):
    """The tenant has no response with the id `previous_response_id`."""

    status = 404
    code = "previous_response_not_found"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A stored response, with the data that another process needs to continue it."""

    tenant: str
    response: dict[str, Any]  # the JSON that clients get
    expires: float
    input: list[dict[str, Any]] = field(default_factory=list)  # the JSON items that clients can list
    call: Mapping[str, Any] | None = None  # the tool calls that the text has; see `Answer`
    ids: list[int] = field(default_factory=list)  # ids of the generated tokens; empty when the response has ended
    ends: list[int] = field(default_factory=list)  # for each token, the length of the text that is complete after it; see `Said`
    raw: str | None = None  # the generated text if it may have tool calls; None for a message
    state: str | None = None  # id of the state after the last token; the state exists only after the response has ended
    work: dict[str, Any] | None = None  # result of `work_of`; None if no other process can generate the response
    numerics: str = ""  # fingerprint of the arithmetic with which `ids` were sampled
    owners: int = 0  # number of processes that have begun to generate the response
    conversation: str | None = None  # id of the conversation to which the response is added at its end
    before: int = 0  # the conversation's version at the beginning of the response
    version: int = 0
    due: float | None = None

    @property
    def id(self) -> str:
        response_id: str = self.response["id"]
        return response_id

    @property
    def status(self) -> str:
        status: str = self.response["status"]
        return status

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def document(self) -> Document:
        names = ("response", "input", "call", "ids", "ends", "raw", "state", "work", "numerics", "owners", "conversation", "before")
        body = whole({name: getattr(self, name) for name in names})
        return Document(kind=KIND, id=self.id, tenant=self.tenant, body=body, due=self.due, expires=self.expires)

    @classmethod
    def of(cls, document: Document) -> Self:
        rest: dict[str, Any] = {
            "tenant": document.tenant,
            "version": document.version,
            "due": document.due,
            "expires": document.expires or 0.0,
        }
        return cls(**orjson.loads(document.body), **rest)

    def said(self) -> Said:
        item = next(iter(self.response["output"]), None)
        part: dict[str, Any] = {} if item is None or item["type"] != "message" else next(iter(item["content"]), {})
        text = part.get("text", "") if self.raw is None else self.raw
        return Said.stored({"ids": self.ids, "ends": self.ends, "text": text, "logprobs": part.get("logprobs", [])})

    def answer(self) -> "StoredAnswer":
        return StoredAnswer(self)


class StoredAnswer(Answer):
    """A response whose JSON comes from the store."""

    def __init__(self, row: Row) -> None:
        super().__init__({**row.response, "output": []}, row.said(), row.call)
        self._row = row

    def begun(self, status: str) -> dict[str, Any]:
        unknown: dict[str, Any] = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        begun = {**self.head, **unknown, "status": status}
        begun.pop("state", None)
        return begun

    def response(self) -> dict[str, Any]:
        return self._row.response


# Functions that run on the store's thread ------------------------------------------------------------------------------------------------


def create(engine: StateEngine, row: Row, quota: Quota, key: IdempotencyKey | None) -> str | int:
    """Write a new response, and return its version. If an earlier request had the same key, write nothing and return its response's id.

    Raises KeyReused if the earlier request had other content.
    """
    with engine.group():
        if key is not None:
            if (earlier := _answered(engine, row.tenant, key)) is not None:
                return earlier
            content = orjson.dumps({"digest": key.digest, "response": row.id})
            expires = min(time.time() + _KEY_S, row.expires)
            engine.write(Document(kind=KEY_KIND, id=key.key, tenant=row.tenant, body=content, expires=expires), None, quota)
        return engine.write(row.document(), 0, quota)


def _answered(engine: StateEngine, tenant: str, key: IdempotencyKey) -> str | None:
    """Return the id of the response to an earlier request with this key, or None if there is no such request or response."""
    try:
        known = orjson.loads(engine.read(tenant, KEY_KIND, key.key).body)
    except StateNotFound:
        return None
    if known["digest"] != key.digest:
        raise KeyReused(f"the Idempotency-Key {key.key!r} was used for another request: use a new key")
    try:
        return find(engine, tenant, known["response"]).id
    except ResponseNotFound:  # the response failed before its first token, or was deleted
        return None


def write(engine: StateEngine, row: Row, document: Document, quota: Quota, ttl_s: float) -> int:
    """Write `document`, which is the serialised `row`, and return its new version. If the response is completed or incomplete, also add its
    input and output to its conversation. Raises DocumentMoved if the stored row has another version than `row`."""
    if row.conversation is None or row.status not in CONTINUABLE:
        return engine.write(document, row.version, quota)
    items = [*row.input, *(_without_logprobs(item) for item in orjson.loads(document.body)["response"]["output"])]
    read = replace(document, version=row.version)
    return conversations.append(engine, read, row.conversation, row.before, items, row.state, quota, ttl_s)


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]} if item["type"] == "message" else item


def find(engine: StateEngine, tenant: str, response: str) -> Row:
    """Return a response of the tenant. Raises ResponseNotFound if the tenant has none with this id. The error does not show whether another
    tenant has one."""
    try:
        return Row.of(engine.read(tenant, KIND, response))
    except StateNotFound:
        shown = response if len(response) <= 100 else f"{response[:100]}.."
        raise ResponseNotFound(f"Response with id '{shown}' not found.", param="response_id") from None


def previous(engine: StateEngine, tenant: str, response: str) -> str:
    """Return the id of the state after `response`, which a new response continues. Raises PreviousResponseNotFound, or InvalidRequest if
    the response's status does not allow it."""
    try:
        row = find(engine, tenant, response)
    except ResponseNotFound as error:
        message = f"Previous r{error.message.removeprefix('R')}"
        raise PreviousResponseNotFound(message, param="previous_response_id") from None
    if row.status not in CONTINUABLE or row.state is None:
        why = "wait until it is completed" if not row.ended else "continue the response before it"
        raise InvalidRequest(
            f"the response {row.id} is {row.status}, and only a completed or incomplete one can be continued: {why}",
            param="previous_response_id",
        )
    return row.state


def erase(engine: StateEngine, tenant: str, response: str) -> None:
    """Delete a response, and its state unless the state is pinned or has a name. Raises ResponseNotFound."""
    with engine.group():
        row = find(engine, tenant, response)
        engine.erase(tenant, KIND, response, None)
        drop_state(engine, row)


def drop_state(engine: StateEngine, row: Row) -> None:
    """Delete the state of a deleted response, unless the state is pinned or has a name."""
    if row.state is None:
        return
    try:
        if not engine.get(row.tenant, row.state).pinned and not engine.names(row.tenant, row.state):
            engine.delete(row.tenant, row.state)
    except ServiceError:  # the state is gone, or was never stored
        return


def cancel(engine: StateEngine, tenant: str, response: str, quota: Quota) -> Row:
    """Mark a background response as cancelled unless it has ended, and return its row. The process that generates it stops at its next
    write. Raises ResponseNotFound, InvalidRequest if the response is not in the background, or DocumentMoved."""
    row = find(engine, tenant, response)
    if not row.response["background"]:
        raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id")
    if row.ended:
        return row
    row = ended(row, "cancelled")
    engine.write(row.document(), row.version, quota)
    return row


def ended(row: Row, status: str, **fields: Any) -> Row:
    """Return the row with this status, and without the data that another process would need to continue the response."""
    output = [{**item, "status": "incomplete"} for item in row.response["output"]]
    response = {**row.response, "status": status, "output": output, **fields}
    return replace(row, response=response, ids=[], work=None, due=None)
