"""Creates the record of a new state from the options of a request: its expiry, pin, metadata and quota."""

import time

from service.dialects.states.options import KeepFields, Ttl
from service.settings import Settings
from service.states.record import Origin, Quota, StateRecord, Turn, new_state_id


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
