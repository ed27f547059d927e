"""Responses in the store: one document each, and one for each idempotency key.

Every write names the version that was read. So of two processes one writes, and the other one learns that it does not own the response.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import orjson

from service.dialects.openai.responses.answer import ENDED, Answer
from service.dialects.openai.responses.said import Said
from service.errors import InvalidRequest, KeyReused, ServiceError, StateNotFound
from service.http.answers import whole
from service.states.record import Document, IdempotencyKey, Quota
from service.states.store import GroupingEngine

KIND, KEY_KIND = "response", "response_key"
LEASE_S = 15.0  # an owner that has not written for so long is taken to be lost
_KEY_S = 86_400.0  # how long an idempotency key is remembered


class ResponseNotFound(ServiceError):
    """There is no such response, or it is another tenant's."""

    status = 404
    code = "response_not_found"


class PreviousResponseNotFound(ServiceError):
    """There is no response with the `previous_response_id`, or it is another tenant's."""

    status = 404
    code = "previous_response_not_found"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A stored response."""

    tenant: str
    response: dict[str, Any]  # as clients get it
    expires: float
    input: list[dict[str, Any]] = field(default_factory=list)  # as clients can list it
    call: Mapping[str, str | None] | None = None  # see `Answer`
    ids: list[int] = field(default_factory=list)  # of the tokens, empty after the end
    ends: list[int] = field(default_factory=list)  # see `Said`
    raw: str | None = None  # the text that a tool call was read from
    state: str | None = None  # id of the state after the last token; it is there after the end
    work: dict[str, Any] | None = None  # what a process needs to generate it; None: only its first owner can
    numerics: str = ""  # of the arithmetic that has drawn `ids`
    owners: int = 0  # processes that have generated it
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
        names = ("response", "input", "call", "ids", "ends", "raw", "state", "work", "numerics", "owners")
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
    """A response as it is in the store."""

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


# What callers ask of the store's thread --------------------------------------------------------------------------------------------------


def create(engine: GroupingEngine, row: Row, quota: Quota, key: IdempotencyKey | None) -> str | int:
    """Write a new response, and return its version; or the id of the response that an earlier request with this key has made.

    Raises KeyReused if that was another request.
    """
    with engine.group():
        if key is not None:
            if (earlier := _answered(engine, row.tenant, key)) is not None:
                return earlier
            content = orjson.dumps({"digest": key.digest, "response": row.id})
            expires = min(time.time() + _KEY_S, row.expires)
            engine.write(Document(kind=KEY_KIND, id=key.key, tenant=row.tenant, body=content, expires=expires), None, quota)
        return engine.write(row.document(), 0, quota)


def _answered(engine: GroupingEngine, tenant: str, key: IdempotencyKey) -> str | None:
    """Return the response that an earlier request with this key has made, or None if there is none any more."""
    try:
        known = orjson.loads(engine.read(tenant, KEY_KIND, key.key).body)
    except StateNotFound:
        return None
    if known["digest"] != key.digest:
        raise KeyReused(f"the Idempotency-Key {key.key!r} was used for another request: use a new key")
    try:
        return find(engine, tenant, known["response"]).id
    except ResponseNotFound:  # it failed before its first token, or was deleted
        return None


def find(engine: GroupingEngine, tenant: str, response: str) -> Row:
    """Raises ResponseNotFound with the same text whatever the reason."""
    try:
        return Row.of(engine.read(tenant, KIND, response))
    except StateNotFound:
        shown = response if len(response) <= 100 else f"{response[:100]}.."
        raise ResponseNotFound(f"Response with id '{shown}' not found.", param="response_id") from None


def previous(engine: GroupingEngine, tenant: str, response: str) -> str:
    """Return the state after a response that a new one continues. Raises PreviousResponseNotFound, or InvalidRequest by its status."""
    try:
        row = find(engine, tenant, response)
    except ResponseNotFound as error:
        message = f"Previous r{error.message.removeprefix('R')}"
        raise PreviousResponseNotFound(message, param="previous_response_id") from None
    if row.status not in ("completed", "incomplete") or row.state is None:
        why = "wait until it is completed" if not row.ended else "continue the response before it"
        raise InvalidRequest(
            f"the response {row.id} is {row.status}, and only a completed or incomplete one can be continued: {why}",
            param="previous_response_id",
        )
    return row.state


def erase(engine: GroupingEngine, tenant: str, response: str) -> None:
    """Forget a response, and its state unless that is pinned or has a name. Raises ResponseNotFound."""
    with engine.group():
        row = find(engine, tenant, response)
        engine.erase(tenant, KIND, response, None)
        drop_state(engine, row)


def drop_state(engine: GroupingEngine, row: Row) -> None:
    """Delete the state of a response that is gone, unless it is pinned or has a name."""
    if row.state is None:
        return
    try:
        if not engine.get(row.tenant, row.state).pinned and not engine.names(row.tenant, row.state):
            engine.delete(row.tenant, row.state)
    except ServiceError:  # it is gone already, or was never made
        return


def cancel(engine: GroupingEngine, tenant: str, response: str, quota: Quota) -> Row:
    """End a background response that has not ended. Its owner learns of it at its next write. Raises ResponseNotFound,
    InvalidRequest or DocumentMoved."""
    row = find(engine, tenant, response)
    if not row.response["background"]:
        raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id")
    if row.ended:
        return row
    row = ended(row, "cancelled")
    engine.write(row.document(), row.version, quota)
    return row


def ended(row: Row, status: str, **fields: Any) -> Row:
    """Return the row of a response that no process generates any more."""
    output = [{**item, "status": "incomplete"} for item in row.response["output"]]
    response = {**row.response, "status": status, "output": output, **fields}
    return replace(row, response=response, ids=[], work=None, due=None)
