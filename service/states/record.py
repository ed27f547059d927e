"""The data that a store has about states, and the arguments of the store's calls."""

import re
import secrets
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Origin = Literal["prompt", "continuation", "fork", "rewind", "upload", "response"]
Status = Literal["ready", "deleted", "expired", "evicted", "damaged"]
Turn = Literal["", "system", "user", "assistant", "generated"]

DOCUMENT_BYTES = 512  # a document counts for so many bytes beside its body, because its row and the rows of its indexes have about that

ID = re.compile(r"state_[0-9a-f]{32}")


def new_state_id() -> str:
    """Return an id of 128 random bits, which cannot be guessed."""
    return f"state_{secrets.token_hex(16)}"


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """The stored data of one state except its tensors. `used`, `expires`, `pinned`, `metadata`, `ids_size` and `status` may change."""

    id: str
    tenant: str  # "" if no keys are set
    model: str
    fingerprint: str  # fingerprint of the model's bundle
    numerics: str  # fingerprint of the machine's arithmetic: machines with equal fingerprints compute equal bits
    position: int  # number of tokens that were fed to the state
    parent: str | None  # id of the state from which this state was made
    origin: Origin
    created: float  # seconds since 1970, as all times here
    used: float  # time at which the state was read most recently, or made
    expires: float | None = None  # time at which the state expires; None: never
    pinned: bool = False  # whether the state is never evicted
    metadata: dict[str, str] = field(default_factory=dict)
    turn: Turn = ""  # role of the message with which the state's text ends; "generated": the model's own message; "": plain text
    sha256: str = ""  # SHA-256 of the state's blob
    size: int = 0  # size of the blob in bytes
    shared_by: int = 1  # number of states with the same blob
    ids_size: int = 0  # bytes of the stored token ids
    status: Status = "ready"
    seq: int = field(default=0, compare=False, repr=False)  # the store's number of the row: newer states have higher numbers


class NameChange(NamedTuple):
    """A change that points a name to another state. `version` is the version that the name must have now; 0: the name must be
    new; None: any version.
    """

    name: str
    version: int | None = None


class Name(NamedTuple):
    """A name and the state it points to. The version grows by 1 when the name is moved. A name made again after its deletion gets a higher
    version than before."""

    name: str
    state: str
    version: int


class IdempotencyKey(NamedTuple):
    """The idempotency key that a client sends with a request, and a digest of the request's content."""

    key: str
    digest: str


class Fork(NamedTuple):
    """The record of a new state that shares its parent's blob, and the idempotency key for it."""

    record: StateRecord
    key: IdempotencyKey | None = None


class Quota(NamedTuple):
    """The limits of one tenant on the number of its states, and on their bytes, as `Usage` counts them. A shared blob counts once.

    A tenant may have as many idempotency keys as states, and as many rows of states that are gone.
    """

    states: int
    size: int


class Usage(NamedTuple):
    """What a tenant stores: the number of its states, and the bytes of its blobs, metadata, token ids and documents (`size`)."""

    states: int = 0
    size: int = 0
    pinned_size: int = 0


class StoredBlob(NamedTuple):
    """A stored blob, which `states` states of one tenant share. `sha256`: the hash of the bytes at the time they were stored."""

    sha256: str
    content: bytes
    states: int


class Filter(NamedTuple):
    """The selection of a tenant's states for a list, newest first. `after`: the id of the last state of the previous page."""

    name: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    model: str | None = None
    origin: Origin | None = None
    after: str | None = None
    limit: int = 20


class Patch(NamedTuple):
    """Changes to a state; None leaves a field as it is. `expires` is a time, or math.inf for never."""

    expires: float | None = None
    pinned: bool | None = None
    metadata: dict[str, str] | None = None


class Ancestor(NamedTuple):
    """One state of a lineage. `ids`: the ids of the tokens that were fed after its parent, as little-endian int32."""

    record: StateRecord
    ids: bytes


class StateReference(NamedTuple):
    """A state to continue. `exact`: continue it only with the arithmetic that made the state, so that the bits are the same. `position`:
    the number of tokens that were fed to the state."""

    tenant: str
    id: str
    exact: bool = True
    position: int = 0


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The record, quota and name with which to store the state after a run's last token. The generator sets the record's `position` and
    `numerics`."""

    record: StateRecord
    quota: Quota
    name: NameChange | None = None
    key: IdempotencyKey | None = None
    gone: bool = False  # whether the state was stored before and does not exist any more: it is not stored again


@dataclass(frozen=True, kw_only=True)
class Document:
    """A small row of JSON beside the states, such as a response, a conversation or a run. Its key is tenant, kind and id."""

    kind: str
    id: str
    tenant: str
    body: bytes
    version: int = 0  # number of times the document was written; 0: not written yet
    due: float | None = None  # time at which a sweep should handle the document, such as the end of a lease; None: never
    expires: float | None = None  # None: never
    seq: int = field(default=0, compare=False, repr=False)  # the store's number of the row, in the order of the first writes
