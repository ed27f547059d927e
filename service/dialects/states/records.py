"""The records of states: that of a new state, from the options of its request, and the JSON of stored ones."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response

from service.call import Call
from service.dialects.states.finding import etag
from service.dialects.states.options import KeepFields, Ttl
from service.http.routing import json_response
from service.settings import Settings
from service.states.engine import StateEngine
from service.states.record import Ancestor, IdempotencyKey, Name, Origin, Quota, StateRecord, Turn, new_state_id

REPLAYED_HEADER = "idempotent-replayed"


def quota_of(settings: Settings) -> Quota:
    return Quota(settings.max_states, settings.max_state_bytes)


def expires_at(ttl_s: Ttl | None, settings: Settings, now: float) -> float | None:
    """Return the time at which a state expires, in seconds since 1970, or None if it never expires."""
    return None if ttl_s == "never" else now + (settings.state_ttl_s if ttl_s is None else ttl_s)


def state_of(response: str) -> str:
    """Return the id of the state after a response. Both ids have the same digits, so each is known from the other."""
    return f"state_{response.removeprefix('resp_')}"


def response_of(state: str) -> str:
    """Return the id of the response to which a state of the origin `response` belongs."""
    return f"resp_{state.removeprefix('state_')}"


def new_record(
    options: KeepFields,
    settings: Settings,
    *,
    tenant: str,
    model: str,
    fingerprint: str,
    parent: str | None,
    origin: Origin,
    turn: Turn,
    position: int = 0,
    numerics: str = "",
) -> StateRecord:
    """Return the record of a new state. If a generator computes the state, it sets the record's `position` and `numerics`."""
    now = time.time()
    return StateRecord(
        id=new_state_id(),
        tenant=tenant,
        model=model,
        fingerprint=fingerprint,
        numerics=numerics,
        position=position,
        parent=parent,
        origin=origin,
        created=now,
        used=now,
        expires=expires_at(options.ttl_s, settings, now),
        pinned=options.pin,
        metadata=options.metadata,
        turn=turn,
    )


def state_json(record: StateRecord, names: Sequence[Name]) -> dict[str, Any]:
    return {
        "object": "state",
        "id": record.id,
        "model": record.model,
        "position": record.position,
        "bytes": {"logical": record.size, "physical": round(record.size / record.shared_by) if record.shared_by else 0},
        "fingerprint": record.fingerprint,
        "numerics": record.numerics,
        "parent": record.parent,
        "origin": record.origin,
        "response": response_of(record.id) if record.origin == "response" else None,
        "turn": record.turn,
        "names": [{"name": name.name, "version": name.version} for name in names],
        "created": int(record.created),
        "expires": None if record.expires is None else int(record.expires),
        "pinned": record.pinned,
        "metadata": record.metadata,
    }


def described(engine: StateEngine, record: StateRecord) -> dict[str, Any]:
    """Return the JSON of a stored state, with its names."""
    return state_json(record, engine.names(record.tenant, record.id))


def replayed(engine: StateEngine, tenant: str, key: IdempotencyKey) -> dict[str, Any] | None:
    """Return the JSON of the state that an earlier request with this idempotency key has made, or None. Raises KeyReused if the earlier
    request had other content."""
    made = engine.answered(tenant, key)
    return None if made is None else described(engine, made)


def ancestor_json(ancestor: Ancestor, names: Sequence[Name]) -> dict[str, Any]:
    return {**state_json(ancestor.record, names), "status": ancestor.record.status, "tokens": len(ancestor.ids) // 4}


def list_json(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return one page of a list in OpenAI's format."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


def sent(content: Mapping[str, Any], call: Call, *, replayed: bool = False, name: str | None = None) -> Response:
    """Return a response with this content. `name`: the name whose version becomes the ETag. `replayed`: whether an earlier request with the
    same idempotency key made the state."""
    if replayed:
        call.headers[REPLAYED_HEADER] = "true"
    for found in content.get("names", ()):
        if found["name"] == name:
            call.headers["etag"] = etag(found["version"])
    return json_response(content, call)
