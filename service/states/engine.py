"""The interface of a store of states. Every engine has the same behaviour, which tests/service/states/test_contract.py checks.

All calls block. Each call is atomic, and its changes are durable when it returns, within the limits that the engine's docstring states. No
call reveals the data of another tenant: another tenant's id is treated as unknown.
"""

from typing import Protocol

from service.states.record import Ancestor, Document, Filter, IdempotencyKey, Name, NameChange, Patch, Quota, StateRecord, Usage


class StateEngine(Protocol):
    """A store of states. Use it on one thread."""

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

        If `key` was used for the same request before, nothing is written and that request's state is returned. The same holds if this very
        state was put before: a generator may be lost after its write, and another one then writes the state again.
        Raises StateNotFound or StateGone (the parent), NameMoved, KeyReused, QuotaExceeded.
        """
        ...

    def get(self, tenant: str, state: str) -> StateRecord:
        """Return the record of a state. Raises StateNotFound, or StateGone with the reason."""
        ...

    def use(self, tenant: str, state: str) -> StateRecord:
        """Return what `get` returns, and record that the state was used now, so that others are evicted before it."""
        ...

    def blob(self, tenant: str, state: str) -> bytes:
        """Return the bytes of a state, after checking their hash. Raises what `get` raises. If the bytes are damaged, the state becomes
        gone."""
        ...

    def page(self, tenant: str, wanted: Filter) -> list[StateRecord]:
        """Return the states that are ready, newest first."""
        ...

    def change(self, tenant: str, state: str, patch: Patch) -> StateRecord:
        """Change a state. Raises what `get` raises, and QuotaExceeded if the quota does not allow to pin it."""
        ...

    def delete(self, tenant: str, state: str) -> None:
        """Delete a state and the names that point to it. States made from it stay. Raises what `get` raises."""
        ...

    def lineage(self, tenant: str, state: str, most: int | None = None) -> list[Ancestor]:
        """Return the state, its parent, and so on to the first ancestor, at most `most` of them. Ancestors that are gone are listed with
        their status."""
        ...

    def children(self, tenant: str, state: str, limit: int) -> list[StateRecord]:
        """Return the states made from this one that are ready, newest first."""
        ...

    def name(self, tenant: str, name: str) -> Name:
        """Return a name and its state. Raises StateNotFound."""
        ...

    def names(self, tenant: str, state: str) -> list[Name]:
        """Return the names that point to a state."""
        ...

    def move(self, tenant: str, change: NameChange, state: str) -> Name:
        """Point a name to a state. Raises what `get` raises, and NameMoved."""
        ...

    def unname(self, tenant: str, change: NameChange) -> None:
        """Delete a name. Raises StateNotFound or NameMoved."""
        ...

    def answered(self, tenant: str, key: IdempotencyKey) -> StateRecord | None:
        """Return the state of an earlier request with this key, or None. Raises KeyReused if that request had other content."""
        ...

    def usage(self, tenant: str) -> Usage: ...

    def write(self, document: Document, expected: int | None, quota: Quota) -> int:
        """Write a document if its stored version is `expected`; 0: it must be new, None: any. Returns its new version.

        `document.version` is ignored. A document that grows evicts states as `put` does. Raises DocumentMoved or QuotaExceeded.
        """
        ...

    def read(self, tenant: str, kind: str, id: str) -> Document:
        """Return a document. Raises StateNotFound, also after the document has expired."""
        ...

    def erase(self, tenant: str, kind: str, id: str, expected: int | None) -> None:
        """Delete a document. Raises StateNotFound or DocumentMoved."""
        ...

    def documents(self, tenant: str, kind: str, after: str | None, limit: int) -> list[Document]:
        """Return documents of one kind, the newest first, by the time of the first write. `after`: the last id of the previous page.

        Raises StateNotFound if there is no document `after`.
        """
        ...

    def due(self, kind: str, now: float, limit: int) -> list[Document]:
        """Return the documents of all tenants whose `due` is at most `now`, oldest due first. Only the service's own sweeps may call
        this."""
        ...

    def sweep(self) -> int:
        """Expire states and documents, and delete rows and bytes without references. Returns how many states have expired."""
        ...

    def close(self) -> None: ...
