"""Routes that list, read, change, delete and fork states. They run no model."""

import math
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from service.dialects.states.finding import (
    KeyHeader,
    Match,
    MatchDep,
    MatchHeader,
    StatePath,
    change_of,
    find,
    key_of,
    metadata_of,
    metadata_parameter,
    nth,
    on_store,
)
from service.dialects.states.options import KeepFields
from service.dialects.states.records import ancestor_json, described, expires_at, list_json, new_record, quota_of, sent
from service.dialects.states.schemas import (
    ERRORS,
    ChangeState,
    ForkList,
    ForkState,
    Lineage,
    StateDeleted,
    StateList,
    StateObject,
    json_body,
)
from service.errors import InvalidRequest, StateNotFound
from service.http.routing import CallDep, CatalogDep, ContentDep, JsonRoute, json_response, read
from service.settings import Settings
from service.states.engine import StateEngine
from service.states.record import ID, Filter, Fork, Origin, Patch, StateRecord

Limit = Annotated[int, Query(ge=1, le=100, description="Most states of a page.")]


router = APIRouter(route_class=JsonRoute, tags=["States"], responses=ERRORS)

_FILTERS = {"parameters": [metadata_parameter("`metadata[key]=value`: only states with this pair.")]}


@router.get("/v1/states", response_model=StateList, openapi_extra=_FILTERS)
async def states(
    request: Request,
    call: CallDep,
    catalog: CatalogDep,
    limit: Limit = 20,
    after: Annotated[str | None, Query(description="The `last_id` of the page before.")] = None,
    name: Annotated[str | None, Query(description="Only the state with this name.")] = None,
    model: Annotated[str | None, Query(description="Only states of this model.")] = None,
    origin: Annotated[Origin | None, Query(description="Only states that were made in this way, as `response`.")] = None,
) -> Any:
    """List states, newest first."""
    if after is not None and not ID.fullmatch(after):
        raise _no_page()
    wanted = Filter(name=name, metadata=tuple(metadata_of(request)), model=model, origin=origin, after=after, limit=limit + 1)

    def page(engine: StateEngine, tenant: str) -> dict[str, Any]:
        try:
            records = engine.page(tenant, wanted)
        except StateNotFound:
            raise _no_page() from None
        return list_json([described(engine, record) for record in records[:limit]], has_more=len(records) > limit)

    return json_response(await on_store(catalog, call, page), call)


def _no_page() -> StateNotFound:
    return StateNotFound("there is no state `after`: begin with the first page", param="after")


@router.get("/v1/states/{state}", response_model=StateObject)
async def state(state: StatePath, call: CallDep, catalog: CatalogDep) -> Any:
    """Return a state. If the path contains a name of the state, the ETag is the version of the name."""

    def found(engine: StateEngine, tenant: str) -> tuple[dict[str, Any], str | None]:
        record, name = find(engine, tenant, state)
        return described(engine, record), name and name.name

    content, name = await on_store(catalog, call, found)
    return sent(content, call, name=name)


@router.patch("/v1/states/{state}", response_model=StateObject, openapi_extra=json_body(ChangeState))
async def change(state: StatePath, content: ContentDep, call: CallDep, catalog: CatalogDep, match: MatchDep) -> Any:
    """Change a state's expiry, pin and metadata, or point a name to the state. All changes are made together, or none.

    `If-Match` is the version that the name must have now: the name in the body, or else the name in the path. If it has
    another version, the answer is 412.
    """
    body, settings = read(ChangeState, content), catalog.settings
    expires = None if body.ttl_s is None else expires_at(body.ttl_s, settings, time.time()) or math.inf

    def changed(engine: StateEngine, tenant: str) -> tuple[dict[str, Any], str | None]:
        with engine.group():
            record, by = find(engine, tenant, state)
            name = body.name or (by and by.name)
            expected = change_of(engine, tenant, name, match)
            move, guard = (None, expected) if body.name is None else (expected, None)
            record = engine.change(tenant, record.id, Patch(expires, body.pin, body.metadata), name=move, guard=guard)
            return described(engine, record), name

    made, name = await on_store(catalog, call, changed)
    return sent(made, call, name=name)


@router.delete("/v1/states/{state}", response_model=StateDeleted)
async def delete(state: StatePath, call: CallDep, catalog: CatalogDep, if_match: MatchHeader = None) -> Any:
    """Delete a state and its names. States that were made from it are not deleted."""

    def deleted(engine: StateEngine, tenant: str) -> str:
        with engine.group():
            record, name = find(engine, tenant, state)
            if name is None and if_match is not None:
                raise InvalidRequest("If-Match is about a name, and the path has an id: send the name instead", param="If-Match")
            guard = change_of(engine, tenant, name and name.name, Match(if_match))
            engine.delete(tenant, record.id, guard)
            return record.id

    return json_response({"id": await on_store(catalog, call, deleted), "object": "state.deleted", "deleted": True}, call)


@router.post("/v1/states/{state}/fork", response_model=StateObject | ForkList, openapi_extra=json_body(ForkState))
async def fork(
    state: StatePath, content: ContentDep, call: CallDep, catalog: CatalogDep, match: MatchDep, idempotency_key: KeyHeader = None
) -> Any:
    """Make copies of a state, which share its bytes. If the body has `n`, the answer is a list of the copies, in the order of creation.

    If a copy is gone when the request is repeated with its idempotency key, the list has only its id and status.
    """
    body, settings = read(ForkState, content or b"{}"), catalog.settings
    if body.n is not None and body.n > 1 and body.name is not None:
        raise InvalidRequest(f"one name cannot point to n={body.n} states: leave it out, or send n=1", param="name")
    key = key_of(idempotency_key, "fork", state, body.model_dump(), *match)

    def forked(engine: StateEngine, tenant: str) -> tuple[list[dict[str, Any]], bool]:
        earlier = [engine.made(tenant, each) for at in range(body.n or 1) if (each := nth(key, at)) is not None]
        if earlier and (found := [each for each in earlier if each is not None]) and len(found) == len(earlier):
            return [again(engine, tenant, each) for each in found], True
        with engine.group():
            parent = find(engine, tenant, state).record
            move = change_of(engine, tenant, body.name, match)
            forks = [Fork(copied(parent, body, settings), nth(key, at)) for at in range(body.n or 1)]
            if move is None:
                made = engine.fork(forks, quota_of(settings))
            else:
                made = [engine.put(forks[0].record, None, quota=quota_of(settings), name=move, key=key)]
            return [described(engine, record) for record in made], False

    def again(engine: StateEngine, tenant: str, made: str) -> dict[str, Any]:
        if body.n is None or (status := engine.status(tenant, made)) == "ready":
            return described(engine, engine.get(tenant, made))
        return {"object": "state", "id": made, "status": status}

    made, replayed = await on_store(catalog, call, forked)
    return sent(made[0] if body.n is None else list_json(made, has_more=False), call, replayed=replayed, name=body.name)


def copied(parent: StateRecord, options: KeepFields, settings: Settings) -> StateRecord:
    """Return the record of a new state that shares the blob of `parent`."""
    return new_record(
        options,
        settings,
        tenant=parent.tenant,
        model=parent.model,
        fingerprint=parent.fingerprint,
        parent=parent.id,
        origin="fork",
        turn=parent.turn,
        position=parent.position,
        numerics=parent.numerics,
    )


@router.get("/v1/states/{state}/lineage", response_model=Lineage)
async def lineage(
    state: StatePath,
    call: CallDep,
    catalog: CatalogDep,
    limit: Limit = 20,
    after: Annotated[str | None, Query(description="The `last_id` of the page before.")] = None,
) -> Any:
    """Return the state, its parent, and so on to its first ancestor. For a state that is gone, `status` gives the reason."""

    def line(engine: StateEngine, tenant: str) -> dict[str, Any]:
        record = find(engine, tenant, state).record
        ancestors = engine.lineage(tenant, record.id, limit + 1 if after is None else None)
        if after is not None:
            ids = [each.record.id for each in ancestors]
            if after not in ids:
                raise _no_page()
            ancestors = ancestors[ids.index(after) + 1 :]
        data = [ancestor_json(each, engine.names(tenant, each.record.id)) for each in ancestors[:limit]]
        return list_json(data, has_more=len(ancestors) > limit)

    return json_response(await on_store(catalog, call, line), call)
