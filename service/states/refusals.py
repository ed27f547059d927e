"""Creates the errors of all engines of states, so that every engine has the same messages."""

from service.errors import DocumentMoved, KeyReused, NameMoved, QuotaExceeded, StateGone, StateNotFound
from service.states.record import IdempotencyKey, NameChange, Quota, Status, Usage

_WHY: dict[Status, str] = {
    "expired": "it has expired",
    "evicted": "it was evicted to make room for newer states; pin a state to keep it",
    "damaged": "its stored bytes are damaged; they were set apart",
}


def no_state(state: str) -> StateNotFound:
    return StateNotFound(f"there is no state {state}: GET /v1/states lists what there is", param="state")


def no_page(kind: str, after: str) -> StateNotFound:
    return StateNotFound(f"there is no {kind} {after}: begin with the first page", param="after")


def no_name(name: str) -> StateNotFound:
    return StateNotFound(f"there is no state named {name!r}", param="name")


def no_document(kind: str, id: str) -> StateNotFound:
    return StateNotFound(f"there is no {kind} {id}", param="id")


def gone(state: str, why: Status) -> StateGone:
    return StateGone(f"the state {state} is gone: {_WHY[why]}", param="state")


def name_moved(change: NameChange, version: int) -> NameMoved:
    has = f"has version {version}" if version else "does not exist"
    return NameMoved(f"the name {change.name!r} {has}, and the request expects version {change.version}: read it again", param="name")


def document_moved(kind: str, id: str, version: int, expected: int) -> DocumentMoved:
    has = f"has version {version}" if version else "does not exist"
    return DocumentMoved(f"the {kind} {id} {has}, and the request expects version {expected}: read it again", param="id")


def key_reused(key: IdempotencyKey) -> KeyReused:
    return KeyReused(f"the idempotency key {key.key!r} was used for another request: use a new key")


def too_many_names(name: str, most: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"the tenant has {most} names, the limit, and {name!r} would be another one: move an existing name, or delete a state with its "
        "names",
        param="name",
    )


def over_quota(usage: Usage, quota: Quota) -> QuotaExceeded:
    """Return the error for a tenant over its quota. `usage`: the tenant's usage after all possible evictions."""
    return QuotaExceeded(
        f"the tenant would keep {usage.states} states of {usage.size} bytes, documents included and all other states pinned, and may keep "
        f"{quota.states} of {quota.size} bytes: delete or unpin some"
    )
