"""What the stores in SQLite and in Redis must do for `StateEngine`: read and scan rows, commit changes, and keep bytes.

| key of a row | row |
|---|---|
| tenant | `Tenant`: usage, and the highest version of a deleted name |
| state, ID | `StateRecord` or None |
| sharing, SHA256 | `Sharing`: how many states share a blob. Follows from the states |
| kin, ID | the number of rows whose parent is this state. Follows from the states |
| named, ID | the names that point to a state, sorted. Follows from the names |
| name, NAME | `Name` or None |
| key, KEY | `KeptKey` or None |
| document, KIND, ID | `Meta` or None; `Document` after it was written here |
| body, KIND, ID | the bytes of a document or None. To read only |

Indexes, such as the states by time of use, follow from the rows, and the backend keeps them. They show what is committed, without the
changes of a transaction that is not yet.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from service.states.record import Ancestor, StateRecord, StoredBlob, Usage

Key = tuple[str, ...]


class Tenant(NamedTuple):
    states: int = 0
    size: int = 0  # bytes of blobs and documents, and of the metadata and token ids of the states that are ready
    pinned_size: int = 0  # bytes of blobs that a pinned state has
    version_floor: int = 0  # the highest version of a deleted name
    names: int = 0
    keys: int = 0
    gone: int = 0  # rows of states that are gone
    gone_size: int = 0  # bytes of the token ids that these rows keep for their descendants
    seq: int = 0  # the last number of a row, where the store does not have its own numbers
    version: int = 0  # the number of commits, where the store compares it
    registered: bool = True


class Sharing(NamedTuple):
    """How many ready states share a blob, and how many of them are pinned."""

    states: int = 0
    pins: int = 0


class KeptKey(NamedTuple):
    """An idempotency key: the digest of its request, the state that the request made, and the time."""

    digest: str
    state: str
    created: float


class Meta(NamedTuple):
    """A document without its body, whose length is `size`."""

    version: int
    size: int
    due: float | None
    expires: float | None
    seq: int


Reason = Literal["full", "lost", "damaged", "failed"]


class Trouble(NamedTuple):
    """What is wrong with a store: its disk is full; its files were deleted or replaced (`lost`), or are damaged; or its last call failed
    otherwise. The sentence is for users."""

    reason: Reason
    sentence: str


@dataclass
class Changes:
    """The rows of one tenant that a transaction has read (`before`) and changed (`after`)."""

    tenant: str
    frees: bool  # whether the transaction only deletes, so that a full store must accept it
    before: dict[Key, Any] = field(default_factory=dict)
    after: dict[Key, Any] = field(default_factory=dict)
    ids: dict[str, bytes] = field(default_factory=dict)  # the token ids of new states, and b"" for states that lose them
    content: dict[str, bytes] = field(default_factory=dict)  # the bytes that came with new states, by hash
    apart: dict[str, bytes] = field(default_factory=dict)  # damaged bytes, by hash


class Backend(ABC):
    @abstractmethod
    def rows(self, tenant: str, keys: Sequence[Key]) -> list[Any]:
        """Return rows, read at one moment. The table above has their keys."""

    @abstractmethod
    def commit(self, changes: Changes) -> bool:
        """Apply the changes of a transaction, all together and durably. Return False, and apply nothing, if another transaction of the
        tenant was committed since `before` was read."""

    @abstractmethod
    def newest(self, tenant: str, index: str, below: float, limit: int) -> list[str]:
        """Return ids with a number below `below`, the highest number first. `index`: `ready` for states, `docs:KIND` for
        documents."""

    @abstractmethod
    def oldest(self, tenant: str, index: str, skip: int, limit: int) -> list[str]:
        """Return ids of an index, the earliest first. `index`: `lru` for ready states that are not pinned, by their last use; `gone` for
        states that are gone, by their end; `keys` by their age."""

    @abstractmethod
    def sharing(self, tenant: str, sha256: str) -> list[str]:
        """Return the ids of the states that share a blob."""

    @abstractmethod
    def timed(self, index: str, until: float, limit: int) -> list[tuple[str, str]]:
        """Return tenants and members, of all tenants, whose time is at most `until`, the earliest first. `index`: `end` for states that
        expire, `gone` for states that are gone, `keys`, `docs_end` for documents that expire (KIND:ID), `due:KIND` for documents."""

    @abstractmethod
    def line(self, tenant: str, state: str, most: int) -> list[Ancestor]:
        """Return the state, its parent, and so on: at most `most` states, also those that are gone."""

    @abstractmethod
    def content(self, tenant: str, record: StateRecord) -> bytes:
        """Return the stored bytes of a state, unchecked; b"" if they are missing."""

    @abstractmethod
    def touch(self, tenant: str, state: str, now: float) -> None:
        """Set a state's time of last use, without a transaction."""

    @abstractmethod
    def totals(self) -> Usage:
        """Return the usage of all tenants together."""

    @abstractmethod
    def blobs(self) -> Iterator[StoredBlob]:
        """Yield all blobs of all tenants. Their hashes are not checked, and the content is empty if the bytes are missing."""

    @abstractmethod
    def group(self) -> AbstractContextManager[None]:
        """Return a context whose calls become durable together. If a call fails in a group inside another group, SQLite undoes the inner
        group, and Redis does not."""

    @abstractmethod
    def spare(self) -> AbstractContextManager[None]:
        """Return a group for one call on a full disk: it may use room that is set aside for deletions. Calls that need more raise
        StoreFull."""

    @abstractmethod
    def trouble(self) -> Trouble | None:
        """Return what is wrong with the store now, as far as the engine knows without a call, or None. May be called on any thread."""

    @abstractmethod
    def close(self) -> None: ...
