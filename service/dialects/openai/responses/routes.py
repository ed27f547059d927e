"""The routes `/v1/responses` of OpenAI, which create, read, continue, cancel and delete responses.

Additions: the sampling fields of `SamplingFields`, and `state` and `store_state`. Streamed events have OpenAI's order, and end with
`response.completed`, `response.incomplete`, `response.failed` or `response.cancelled`. There is no `[DONE]`.
"""

import time
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Query, Response

from service.call import LAST_EVENT_HEADER, Call
from service.catalog import Catalog
from service.dialects.openai.embeddings import OpenAIErrorResponse
from service.dialects.openai.responses import conversations, stored
from service.dialects.openai.responses.answer import Answer, Said, head_of
from service.dialects.openai.responses.events import NEVER, Events, tokens_before
from service.dialects.openai.responses.items import PageDep, listed
from service.dialects.openai.responses.live import Live
from service.dialects.openai.responses.preparing import beginning, check, prepare, work_of
from service.dialects.openai.responses.running import call_of, running_of
from service.dialects.openai.responses.schemas import (
    Include,
    InputTokenCount,
    ItemList,
    ResponseDeleted,
    ResponseObject,
    ResponseRequest,
)
from service.dialects.openai.responses.stored import ResponseLease, Row
from service.dialects.openai.responses.stream_source import Follower, StoredView
from service.dialects.states.finding import key_of, on_store
from service.dialects.states.records import quota_of, state_of
from service.dialects.states.schemas import ERRORS
from service.dialects.text.answer import new_id, sequence_tokens
from service.dialects.text.request import Beginning
from service.dialects.text.schemas import PADDED, STREAM
from service.errors import DeadlineExceeded, InvalidRequest
from service.http import sse
from service.http.answers import json_answer
from service.http.interrupts import EndedAt
from service.http.routing import CallDep, CatalogDep, JsonRoute

_MOST_DIGITS = 16  # of the id of an event

ResponsePath = Annotated[str, Path(description="Id of a response.")]
_KEY_HEADER = {
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "description": "1 to 255 printable characters. The same key and body answer the same response for a day.",
            "schema": {"type": "string"},
        }
    ]
}

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses={**ERRORS, 503: {"model": OpenAIErrorResponse}})


@router.post("/v1/responses", response_model=ResponseObject, responses=STREAM, openapi_extra=_KEY_HEADER)
async def responses(body: ResponseRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the model's answer. With `stream`, the answer is sent as events while it is generated.

    With `store` the response is stored before its first token, and can be read, continued with `previous_response_id`, and deleted.
    With `background` the generation continues if the client disconnects. The client reads the response again until it has ended, or follows
    its stream. Without `stream`, the answer is then a response without output.
    """
    check(body)
    if call.idempotency_key is not None and not body.store:
        raise InvalidRequest("Idempotency-Key needs store=true: the response is found again in the store", param="Idempotency-Key")
    running, key = running_of(catalog), None
    if call.idempotency_key is not None:
        key = key_of(call.idempotency_key, "/v1/responses", orjson.loads(body.model_dump_json(by_alias=True)))
    asked_for, begin, before = await _continued(body, call, catalog)
    response_id = new_id("resp_")
    prepared = await prepare(asked_for, begin, catalog, call, response=response_id)
    if body.background:
        running.check_room(call.tenant_name)
    head = head_of(body, response_id, prepared.model.name, previous=body.previous_response_id or None)
    answer, lease, its_call = Answer(head, Said(), prepared.call), None, call
    if body.store:
        leases = catalog.leases
        assert leases is not None  # there is a decoder
        new = Row(
            tenant=call.tenant_name,
            response=head,
            input=listed(body, response_id),
            call=prepared.call,
            state=state_of(response_id),
            work=work_of(asked_for, begin, prepared, call) if body.background or key is not None else None,
            conversation=body.conversation_id,
            before=before,
            expires=time.time() + catalog.settings.state_ttl_s,
        )
        lease = ResponseLease(leases, new)
        call.pass_on_deadline()  # from here on there may be a response, so what there is of it at the deadline is the answer
        if (earlier := await on_store(catalog, call, stored.create, lease.row, leases.quota, key)) is not None:
            return await _again(earlier, body, call, catalog)
        its_call = call_of(lease.row, call.tenant) if body.background else call
    if body.stream:
        await call.begin_stream()
    begun = answer.response()
    live = Live(catalog, prepared, answer, its_call, lease=lease, streamed=body.stream)
    running.begin(call.tenant_name, live)
    follower = Follower(catalog, live, owner=not body.background, streamed=body.stream)
    if body.stream:
        return await sse.stream(follower, Events(answer, padded=body.padded), call, catalog.settings)
    return json_answer(begun if body.background else (await follower.whole()).response(), call.headers)


@router.post("/v1/responses/input_tokens", response_model=InputTokenCount)
async def input_tokens(body: ResponseRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the `usage.input_tokens` that a response to this body would have. Nothing is generated or stored."""
    check(body)
    asked_for, begin, _ = await _continued(body, call, catalog)
    prepared = await prepare(asked_for, begin, catalog, call, response="")
    return {"object": "response.input_tokens", "input_tokens": sequence_tokens(prepared.request, 0)}


async def _continued(body: ResponseRequest, call: Call, catalog: Catalog) -> tuple[ResponseRequest, Beginning | None, int]:
    """Return the request, the state at which the response begins or None, and the version of its conversation or 0.

    The input of a request in a conversation begins with the conversation's items that the state has not seen.
    """
    if body.conversation is not None:
        return await conversations.continued(body, catalog, call)
    previous = None
    if asked := body.previous_response_id:
        previous = await on_store(catalog, call, stored.previous, asked)
    return body, await beginning(body, previous, catalog, call), 0


async def _again(response: str, body: ResponseRequest, call: Call, catalog: Catalog) -> Response:
    """Answer a request whose idempotency key was used before. `response` is the id of the response to the earlier request."""
    call.headers["idempotent-replayed"] = "true"
    follower = await _follower(response, call, catalog, NEVER)
    if body.stream:
        await call.begin_stream()
        return await sse.stream(follower, Events(follower.answer, padded=body.padded), call, catalog.settings)
    if not follower.answer.head["background"]:
        late = f"the response {response} had no text at the request's deadline: retrieve it by its id, or send the request again"
        try:
            with EndedAt(call.deadline, partial(DeadlineExceeded, late)):
                await follower.whole()
        except DeadlineExceeded:
            if not follower.answer.said.count:
                raise
    return json_answer(follower.answer.response(), call.headers)


_ALL_SENT = {"description": "With `stream` and `Last-Event-ID`: the response has ended, and the client has its last event."}


async def _follower(response: str, call: Call, catalog: Catalog, after: int) -> Follower:
    """Return a reader of the part of the response that comes after the event with the number `after`. Raises ResponseNotFound."""
    row = await on_store(catalog, call, stored.find, response)
    live = running_of(catalog).live(call.tenant_name, response)
    return Follower(catalog, StoredView(catalog, row) if live is None else live, seen=tokens_before(after))


@router.get("/v1/responses/{response_id}", response_model=ResponseObject, responses={**STREAM, 204: _ALL_SENT})
async def response(
    response_id: ResponsePath,
    call: CallDep,
    catalog: CatalogDep,
    stream: Annotated[bool, Query(description="Answer with the response's events, and go on while it is generated.")] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, lt=2**53, description="With `stream`: only the events after this `sequence_number`.")
    ] = None,
    include: Annotated[list[Include], Query(alias="include[]", description="Accepted and ignored.")] = [],  # noqa: B006
    include_obfuscation: Annotated[bool, Query(description=PADDED)] = False,
) -> Any:
    """Return a stored response in its current state. With `stream`, return its events, and follow it until it has ended. The events begin
    after the one in the header `Last-Event-ID`, or else after `starting_after`."""
    if starting_after is not None and not stream:
        raise InvalidRequest("starting_after needs stream=true", param="starting_after")
    if stream:
        param, after = "starting_after", NEVER if starting_after is None else starting_after
        if call.last_event_id is not None:
            param, after = LAST_EVENT_HEADER, _number(call.last_event_id)
        follower = await _follower(response_id, call, catalog, after)
        script = Events(follower.answer, after, param=param, padded=include_obfuscation, ids=True)
        if script.over() and call.last_event_id is not None:
            return Response(status_code=204)  # a browser's EventSource would connect again and again after an empty stream
        await call.begin_stream()
        return await sse.stream(follower, script, call, catalog.settings)
    row = await on_store(catalog, call, stored.find, response_id)
    live = running_of(catalog).live(call.tenant_name, response_id)
    newer = live is not None and not live.lost and not row.ended  # whether this process has more of the response than the store
    return json_answer(live.answer.response() if live is not None and newer else row.response, call.headers)


def _number(event_id: str) -> int:
    if len(event_id) > _MOST_DIGITS or not event_id.isdecimal():
        raise InvalidRequest(f"{LAST_EVENT_HEADER}={event_id[:80]!r} is not the id of an event of this stream", param=LAST_EVENT_HEADER)
    return int(event_id)


@router.delete("/v1/responses/{response_id}", response_model=ResponseDeleted)
async def delete(response_id: ResponsePath, call: CallDep, catalog: CatalogDep) -> Any:
    """Delete a response, and its state unless the state is pinned or has a name. Responses that continue it are not deleted."""
    await on_store(catalog, call, stored.erase, response_id)
    live = running_of(catalog).live(call.tenant_name, response_id)
    if live is not None:
        live.stop()
    return json_answer({"id": response_id, "object": "response", "deleted": True}, call.headers)


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseObject)
async def cancel(response_id: ResponsePath, call: CallDep, catalog: CatalogDep) -> Any:
    """Cancel a background response, and return it. A response that has ended does not change."""
    live = running_of(catalog).live(call.tenant_name, response_id)
    if live is not None and live.background:
        live.stop()
        await live.over()
    row = await on_store(catalog, call, stored.cancel, response_id, quota_of(catalog.settings))
    return json_answer(row.response, call.headers)


@router.get("/v1/responses/{response_id}/input_items", response_model=ItemList)
async def input_items(response_id: ResponsePath, call: CallDep, catalog: CatalogDep, page: PageDep) -> Any:
    """List the input of this response. The input of earlier responses, which this one continues, is not included."""
    row = await on_store(catalog, call, stored.find, response_id)
    return json_answer(page.of(row.input), call.headers)
