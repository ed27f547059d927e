"""Stores responses. Each response is one document of the store, and so is each idempotency key.

While a response is generated, its document names the owner of its lease (`service/streams/lease.py`). So if two processes write, the one
that has lost the lease fails, and learns that it does not own the response.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import orjson

from service.dialects.openai.responses import conversations
from service.dialects.openai.responses.answer import ENDED, Answer, Said, error_of
from service.errors import DocumentMoved, InvalidRequest, KeyReused, ServiceError, StateNotFound
from service.http.answers import whole
from service.states.engine import StateEngine
from service.states.record import Document, IdempotencyKey, Quota
from service.states.refusals import document_moved, no_document
from service.streams.lease import Lease, Leases, Put

KIND, KEY_KIND = "response", "response_key"
CONTINUABLE = ("completed", "incomplete")
_KEY_S = 86_400.0  # seconds for which an idempotency key is stored
_PROGRESS_S = 1.0  # shortest time between two writes of new tokens of a response that no client waits for, in seconds
_BYTES_PER_S = 100_000.0  # limit on the bytes per second that are written for the progress of one response


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
    owner: str = ""  # owner of the lease; "" if no process generates the response
    owners: int = 0  # number of processes that have begun to generate the response
    conversation: str | None = None  # id of the conversation to which the response is added at its end
    before: int = 0  # the conversation's version at the beginning of the response
    version: int = 0
    due: float | None = None

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def status(self) -> str:
        return str(self.response["status"])

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def document(self) -> Document:
        names = "response input call ids ends raw state work numerics owner owners conversation before"
        body = whole({name: getattr(self, name) for name in names.split()})
        return Document(kind=KIND, id=self.id, tenant=self.tenant, body=body, due=self.due, expires=self.expires)

    @classmethod
    def of(cls, document: Document) -> Self:
        rest: Any = {"tenant": document.tenant, "version": document.version, "due": document.due, "expires": document.expires or 0.0}
        names = {each.name for each in fields(cls)}  # without the fields that a newer version of the service may have written
        return cls(**{name: value for name, value in orjson.loads(document.body).items() if name in names}, **rest)

    def said(self) -> Said:
        item = next(iter(self.response["output"]), None)
        part: dict[str, Any] = {} if item is None or item["type"] != "message" else next(iter(item["content"]), {})
        text = part.get("text", "") if self.raw is None else self.raw
        return Said(self.ids, self.ends, text, [orjson.dumps(each) for each in part.get("logprobs", [])])

    def answer(self) -> Answer:
        return Answer({**self.response, "output": []}, self.said(), self.call)


class ResponseLease(Lease):
    """The right of this process to generate a stored response.

    `row` is the response as it began here. The lease writes the result of `now`: the response with the tokens generated so far.
    """

    kind = KIND

    def __init__(self, leases: Leases, row: Row) -> None:
        super().__init__(leases, row.tenant, row.id)
        self.row = replace(row, owner=self.owner, owners=row.owners + 1, due=time.time() + leases.lease_s)
        self.now: Callable[[], Row] = lambda: self.row
        self._count = 0  # tokens of the last write
        self._size = 0  # bytes of the last write
        self._next = 0.0  # time from which new tokens are written, by the monotonic clock

    def note(self, count: int) -> None:
        """Write the response if it has new tokens, in all `count`, and the last write is long enough ago."""
        if count > self._count and self._leases.clock() >= self._next:
            self.renew()

    async def finish(self, row: Row) -> None:
        """End the lease, and write the response for the last time. May be called again if the write has failed.

        Raises DocumentMoved or StateNotFound if another process has taken over, ended or deleted the response.
        """
        if self.lost:
            raise document_moved(KIND, row.id, row.version, 0)
        self.leave()
        self.now = lambda: row
        self._submit(self.snapshot(""))
        await self.written()

    def erase(self, engine: StateEngine) -> None:
        """See `Lease`. Another process may have taken the response over, and then nothing is deleted."""
        with suppress(StateNotFound, DocumentMoved):
            self.write(engine, lambda engine, version: engine.erase(self.tenant, KIND, self.id, version))
            drop_state(engine, self.row)

    def snapshot(self, owner: str) -> Put:
        """See `Lease`. The function raises StateNotFound if the response was deleted."""
        row, quota = replace(self.now(), owner=owner), self._leases.quota
        if owner:
            row = replace(row, due=time.time() + self._leases.lease_s)
        self._count = len(row.ends)
        self._next = self._leases.clock() + _PROGRESS_S + self._size / _BYTES_PER_S

        def put(engine: StateEngine, version: int | None) -> None:
            if not version:
                raise no_document(KIND, row.id)
            document = row.document()
            self._size = len(document.body)
            _write(engine, replace(row, version=version), document, quota)

        return put


# Functions that run on the store's thread ------------------------------------------------------------------------------------------------


def create(engine: StateEngine, tenant: str, row: Row, quota: Quota, key: IdempotencyKey | None) -> str | None:
    """Write a new response and its key, both or none. If an earlier request had the same key, write nothing and return its response's id.

    Raises KeyReused if the earlier request had other content, or DocumentMoved if another process writes the key at the same time.
    """
    documents: list[tuple[Document, int]] = [(row.document(), 0)]
    if key is not None:
        earlier, version = _answered(engine, tenant, key)
        if earlier is not None:
            return earlier
        content = orjson.dumps({"digest": key.digest, "response": row.id})
        expires = min(time.time() + _KEY_S, row.expires)
        documents.append((Document(kind=KEY_KIND, id=key.key, tenant=tenant, body=content, expires=expires), version))
    engine.write_all(documents, quota)
    return None


def _answered(engine: StateEngine, tenant: str, key: IdempotencyKey) -> tuple[str | None, int]:
    """Return two values: the id of the response to an earlier request with this key, or None if there is no such request or response; and
    the version of the stored key, 0 if there is none."""
    try:
        stored = engine.read(tenant, KEY_KIND, key.key)
    except StateNotFound:
        return None, 0
    known = orjson.loads(stored.body)
    if known["digest"] != key.digest:
        raise KeyReused(f"the Idempotency-Key {key.key!r} was used for another request: use a new key")
    try:
        return find(engine, tenant, known["response"]).id, stored.version
    except ResponseNotFound:  # the response failed before its first token, or was deleted
        return None, stored.version


def _write(engine: StateEngine, row: Row, document: Document, quota: Quota) -> None:
    """Write `document`, which is the serialised `row`. If the response is completed or incomplete, also add its input and output to its
    conversation. Raises DocumentMoved if the stored row has another version than `row`."""
    if row.conversation is None or row.status not in CONTINUABLE:
        engine.write(document, row.version, quota)
        return
    items = [*row.input, *(_without_logprobs(item) for item in orjson.loads(document.body)["response"]["output"])]
    read = replace(document, version=row.version)
    conversations.append(engine, read, row.conversation, row.before, items, row.state, quota)


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
    return replace(row, response=response, ids=[], work=None, owner="", due=None)


def failed(row: Row, error: ServiceError) -> Row:
    """Return the row with status `failed` and this error."""
    return ended(row, "failed", error=error_of(error))
