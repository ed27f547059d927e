"""Random sequences of calls of a store, to compare engines and to crash them."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from service.errors import ServiceError, StoreFailed
from service.states.engine import StateEngine
from service.states.record import Document, Filter, Fork, IdempotencyKey, NameChange, Origin, Patch, Quota, StateRecord, new_state_id

TENANTS = ("acme", "other {tenant}")
QUOTA = Quota(states=12, size=25_000)


def a_record(at: float = 1.0, **fields: Any) -> StateRecord:
    """A state that was made and used at this time."""
    given = {"id": new_state_id(), "tenant": "acme", "model": "m", "fingerprint": "f", "numerics": "n", "position": 1}
    return StateRecord(**{**given, "parent": None, "origin": "prompt", "created": at, "used": at, **fields})


def plain(value: Any) -> Any:
    """Without the times when states were used last, which an engine may note later."""
    if isinstance(value, StateRecord):
        return replace(value, used=0.0)
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def contents(engine: StateEngine) -> dict[str, Any]:
    """All that two tenants can see, and their usage. It also reads each blob, which changes when states were used."""
    found = {}
    for tenant in TENANTS:
        states = engine.page(tenant, Filter(limit=1000))
        found[tenant] = {
            "states": plain([(each, engine.names(tenant, each.id), engine.lineage(tenant, each.id)) for each in states]),
            "blobs": [engine.blob(tenant, each.id) for each in states],
            "documents": engine.documents(tenant, "run", None, 1000),
            "usage": engine.usage(tenant),
        }
    return found


def step(engine: StateEngine, chance: random.Random, at: int, made: list[tuple[str, str]]) -> Any:
    """One call at second `at`, the same for every engine if `chance` has the same seed. Returns its name, and its result or refusal.

    `made`: tenants and ids of the states made so far.
    """
    tenant = chance.choice(TENANTS)
    own = [state for owner, state in made if owner == tenant] or ["state_" + "0" * 32]
    state, name = chance.choice(own), NameChange(chance.choice(["doc", "chat"]), chance.choice([None, 0, 1, 2]))
    calls: dict[str, Callable[[], Any]] = {
        "name": lambda: engine.move(tenant, name, state),
        "unname": lambda: engine.unname(tenant, name),
        "change": lambda: engine.change(tenant, state, chance.choice([Patch(pinned=True), Patch(pinned=False), Patch(expires=at + 15.0)])),
        "rename": lambda: engine.change(tenant, state, Patch(pinned=True), name=name),
        "guarded": lambda: engine.change(tenant, state, Patch(metadata={}), guard=name),
        "forks": lambda: _forks(engine, chance, tenant, at, state, made),
        "delete": lambda: engine.delete(tenant, state, chance.choice([None, None, name])),
        "use": lambda: engine.blob(tenant, state),
        "write": lambda: engine.write(_document(tenant, chance, at), chance.choice([None, None, 0, 1, 2]), QUOTA),
        "erase": lambda: engine.erase(tenant, "run", f"run_{chance.randrange(3)}", None),
        "due": lambda: engine.due("run", float(at), 3),
        "sweep": engine.sweep,
        "page": lambda: engine.page(tenant, Filter(after=state, metadata=(("odd", "1"),), limit=2)),
    }
    what = chance.choice([*["put"] * 8, *["fork"] * 3, *calls])
    if what in ("put", "fork"):
        calls[what] = lambda: _put(engine, chance, tenant, at, state, made, fork=what == "fork")
    try:
        return what, plain(calls[what]())
    except StoreFailed:
        raise
    except ServiceError as refusal:
        return what, str(refusal)


def _put(
    engine: StateEngine, chance: random.Random, tenant: str, at: int, parent: str, made: list[tuple[str, str]], *, fork: bool
) -> StateRecord:
    record = _record(chance, tenant, at, parent if fork or chance.random() < 0.5 else None, "fork" if fork else "continuation")
    blob = None if fork else bytes([chance.randrange(4)]) * chance.choice([100, 3_000, 9_000])  # some are equal
    name = NameChange("doc", chance.choice([None, None, 1])) if chance.random() < 0.3 else None
    key = IdempotencyKey(f"key {chance.randrange(5)}", chance.choice(["digest", "digest", "another"])) if chance.random() < 0.2 else None
    kept = engine.put(record, blob, ids=at.to_bytes(4, "little"), quota=QUOTA, name=name, key=key)
    if kept.id == record.id:
        made.append((tenant, record.id))
    return kept


def _forks(engine: StateEngine, chance: random.Random, tenant: str, at: int, parent: str, made: list[tuple[str, str]]) -> list[StateRecord]:
    key = chance.choice([None, f"forks {chance.randrange(3)}"])
    new = [_record(chance, tenant, at, parent, "fork", nth) for nth in range(1, chance.choice([2, 3, 9]))]
    forks = [Fork(each, key and IdempotencyKey(f"{key} {nth}", "digest")) for nth, each in enumerate(new)]
    kept = engine.fork(forks, QUOTA)
    made += [(tenant, each.id) for each in new if each.id in {found.id for found in kept}]
    return kept


def _record(chance: random.Random, tenant: str, at: int, parent: str | None, origin: Origin, nth: int = 0) -> StateRecord:
    return a_record(
        float(at),
        id=f"state_{100 * at + nth:032x}",
        tenant=tenant,
        position=at,
        parent=parent,
        origin=origin,
        expires=at + 20.0 if chance.random() < 0.2 else None,
        pinned=chance.random() < 0.1,
        metadata={"odd": str(at % 2)},
    )


def _document(tenant: str, chance: random.Random, at: int) -> Document:
    due, expires = chance.choice([None, at + 3.0]), chance.choice([None, at + 10.0])
    body = chance.randbytes(chance.choice([0, 50, 2_000]))
    return Document(kind="run", id=f"run_{chance.randrange(3)}", tenant=tenant, body=body, due=due, expires=expires)
