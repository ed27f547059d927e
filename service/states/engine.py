"""The interface of a store of states. Every engine has the same behaviour, which tests/service/states/test_contract.py checks.

All calls block. Each call is atomic, and its changes are durable when it returns, within the limits that the engine's docstring states. No
call reveals the data of another tenant: another tenant's id is treated as unknown.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from service.states.record import Ancestor, Document, Filter, Fork, IdempotencyKey, Name, NameChange, Patch, Quota, StateRecord, Usage

SWEPT = 256  # limit on the rows that one call of `sweep` ends or deletes, because other calls of the store wait during the call


Reason = Literal["full", "lost", "damaged", "failed"]


class Trouble(NamedTuple):
    """What is wrong with a store: its disk is full; its files were deleted or replaced (`lost`), or are damaged; or its last call failed
    otherwise. The sentence is for users."""

    reason: Reason
    sentence: str


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
        """Store a state, and return its record. `blob` None: the state shares its parent's blob. `ids`: the token ids since its parent.

        If `key` was used for the same request before, nothing is written, and the earlier request's state is returned. If a state with this
        id was stored before with the same bytes, nothing is written either: another generator may have written it before it was lost.
        Raises StateNotFound or StateGone for the parent, NameMoved, KeyReused, QuotaExceeded.
        """
        ...

    def fork(self, forks: Sequence[Fork], quota: Quota) -> list[StateRecord]:
        """Store several states that share the blob of one parent, each like `put` with `blob` None. All of them are stored, or none."""
        ...

    def get(self, tenant: str, state: str) -> StateRecord:
        """Return the record of a state. Raises StateNotFound, or StateGone with the reason."""
        ...

    def use(self, tenant: str, state: str) -> StateRecord:
        """Return the record as `get` does, and set the state's time of last use to now, so that older states are evicted first."""
        ...

    def blob(self, tenant: str, state: str) -> bytes:
        """Return the bytes of a state, after checking their hash. If the bytes are damaged, all states that share them become gone. Raises
        StateNotFound or StateGone."""
        ...

    def page(self, tenant: str, wanted: Filter) -> list[StateRecord]:
        """Return the tenant's states that match the filter `wanted` and are ready, newest first."""
        ...

    def change(
        self, tenant: str, state: str, patch: Patch, *, name: NameChange | None = None, guard: NameChange | None = None
    ) -> StateRecord:
        """Change a state, point `name` to it, and return its record. Raises StateNotFound, StateGone, or NameMoved if `name` or `guard`
        expects another version."""
        ...

    def delete(self, tenant: str, state: str, guard: NameChange | None = None) -> None:
        """Delete a state and the names that point to it. States that were made from it are not deleted. Raises StateNotFound, StateGone, or
        NameMoved if `guard` expects another version."""
        ...

    def lineage(self, tenant: str, state: str, most: int | None = None) -> list[Ancestor]:
        """Return the state, its parent, and so on to the first ancestor: at most `most` states. States that are gone are included."""
        ...

    def children(self, tenant: str, state: str, limit: int) -> list[StateRecord]:
        """Return the ready states whose parent is this state, newest first."""
        ...

    def name(self, tenant: str, name: str) -> Name:
        """Return a name and its state. Raises StateNotFound."""
        ...

    def names(self, tenant: str, state: str) -> list[Name]:
        """Return the names that point to a state."""
        ...

    def move(self, tenant: str, change: NameChange, state: str) -> Name:
        """Point a name to a state, and return the name. Raises StateNotFound, StateGone or NameMoved."""
        ...

    def unname(self, tenant: str, change: NameChange) -> None:
        """Delete a name. Raises StateNotFound or NameMoved."""
        ...

    def answered(self, tenant: str, key: IdempotencyKey) -> StateRecord | None:
        """Return the state that an earlier request with this key has made, or None. Raises KeyReused if that request had other content."""
        ...

    def usage(self, tenant: str) -> Usage: ...

    def write(self, document: Document, expected: int | None, quota: Quota) -> int:
        """Write a document, and return its new version. `expected` is the version it must have now; 0: it must be new, None: any version.

        `document.version` is ignored. If the tenant is over its quota, states are evicted as in `put`. Raises DocumentMoved if the document
        has another version than `expected`, or QuotaExceeded.
        """
        ...

    def write_all(self, documents: Sequence[tuple[Document, int | None]], quota: Quota) -> list[int]:
        """Write several documents of one tenant, each with its expected version, like `write`. All of them are written, or none."""
        ...

    def read(self, tenant: str, kind: str, id: str) -> Document:
        """Return a document. Raises StateNotFound if there is none or it has expired."""
        ...

    def erase(self, tenant: str, kind: str, id: str, expected: int | None) -> None:
        """Delete a document. Raises StateNotFound or DocumentMoved."""
        ...

    def documents(self, tenant: str, kind: str, after: str | None, limit: int) -> list[Document]:
        """Return a page of the documents of one kind, ordered by the time of their first write, newest first. `after`: the last id of the
        previous page.

        Raises StateNotFound if there is no document `after`.
        """
        ...

    def due(self, kind: str, now: float, limit: int) -> list[Document]:
        """Return documents of all tenants whose `due` is at most `now`, the earliest due first. Only the service's own sweeps may call
        this method."""
        ...

    def sweep(self) -> bool:
        """Expire states and documents, and delete rows and bytes without references: at most `SWEPT` rows. Return whether there may be more
        to do, so that the caller calls again."""
        ...

    def close(self) -> None: ...
