"""What a store of states can do. Every engine has the same behaviour, which tests/service/states/test_contract.py checks.

All calls block. Each is atomic, and durable when it has returned, as far as the engine's docstring promises. No call shows one tenant
anything of another: a foreign id is a missing id.
"""

from typing import Protocol

from service.states.record import Ancestor, Document, Filter, IdempotencyKey, Name, NameChange, Patch, Quota, StateRecord, Usage


class StateEngine(Protocol):
    """A store on one thread."""

    def put(
        self,
        record: StateRecord,
        blob: bytes | None,
        *,
        ids: bytes = b"",
        quota: Quota,
        name: NameChange | None = None,
        key: IdempotencyKey | None = None,
    ) -> StateRecord:
        """Keep a state. `blob` None: it shares the blob of its parent, with no bytes of its own. `ids`: tokens since its parent.

        If `key` was used for the same request before, nothing is written and that request's state is returned.
        Raises StateNotFound or StateGone (the parent), NameMoved, KeyReused, QuotaExceeded.
        """
        ...

    def get(self, tenant: str, state: str) -> StateRecord:
        """Raises StateNotFound, or StateGone with the reason."""
        ...

    def use(self, tenant: str, state: str) -> StateRecord:
        """As `get`, and note that the state was used now, so that others are evicted before it."""
        ...

    def blob(self, tenant: str, state: str) -> bytes:
        """The bytes of a state, checked against their hash. Raises as `get`; damaged bytes are set apart, and the state is gone."""
        ...

    def page(self, tenant: str, wanted: Filter) -> list[StateRecord]:
        """States that are ready, newest first."""
        ...

    def change(self, tenant: str, state: str, patch: Patch) -> StateRecord:
        """Raises as `get`, and QuotaExceeded if pinning it leaves no room."""
        ...

    def delete(self, tenant: str, state: str) -> None:
        """Forget a state and the names that point to it. States made from it stay. Raises as `get`."""
        ...

    def lineage(self, tenant: str, state: str, most: int | None = None) -> list[Ancestor]:
        """The state, its parent, and so on to the first one; at most `most` of them. Those that are gone are listed with their status."""
        ...

    def children(self, tenant: str, state: str, limit: int) -> list[StateRecord]:
        """States made from this one that are ready, newest first."""
        ...

    def name(self, tenant: str, name: str) -> Name:
        """Raises StateNotFound."""
        ...

    def names(self, tenant: str, state: str) -> list[Name]:
        """The names that point to a state."""
        ...

    def move(self, tenant: str, change: NameChange, state: str) -> Name:
        """Point a name to a state. Raises as `get`, and NameMoved."""
        ...

    def unname(self, tenant: str, change: NameChange) -> None:
        """Forget a name. Raises StateNotFound or NameMoved."""
        ...

    def answered(self, tenant: str, key: IdempotencyKey) -> StateRecord | None:
        """The state of an earlier request with this key. Raises KeyReused if that was another request."""
        ...

    def usage(self, tenant: str) -> Usage: ...

    def write(self, document: Document, expected: int | None, quota: Quota) -> int:
        """Keep a document if its version is `expected`; 0: it must be new, None: any. Returns its new version.

        `document.version` is ignored. A document that grows evicts states as `put` does. Raises DocumentMoved or QuotaExceeded.
        """
        ...

    def read(self, tenant: str, kind: str, id: str) -> Document:
        """Raises StateNotFound, also after the document has expired."""
        ...

    def erase(self, tenant: str, kind: str, id: str, expected: int | None) -> None:
        """Forget a document. Raises StateNotFound or DocumentMoved."""
        ...

    def documents(self, tenant: str, kind: str, after: str | None, limit: int) -> list[Document]:
        """Documents of one kind, in the reverse order of their first write. `after`: the last id of the page before.

        Raises StateNotFound if there is no document `after`.
        """
        ...

    def due(self, kind: str, now: float, limit: int) -> list[Document]:
        """Documents of all tenants whose `due` is at most `now`, oldest due first. For the service's own sweeps, not for tenants."""
        ...

    def sweep(self) -> int:
        """Expire states and documents, and forget what nothing refers to; returns how many states have expired."""
        ...

    def close(self) -> None: ...
