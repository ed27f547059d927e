"""The data that a store keeps about states, and the arguments of its calls."""

import re
import secrets
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Origin = Literal["prompt", "continuation", "fork", "rewind", "upload"]
Status = Literal["ready", "deleted", "expired", "evicted", "damaged"]
Turn = Literal["", "system", "user", "assistant", "generated"]

ID = re.compile(r"state_[0-9a-f]{32}")


def new_state_id() -> str:
    """Return an id of 128 random bits, which cannot be guessed."""
    return f"state_{secrets.token_hex(16)}"


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """One state, without its tensors. Only `used`, `expires`, `pinned`, `metadata` and `status` ever change."""

    id: str
    tenant: str  # "" if no keys are set
    model: str
    fingerprint: str  # the bundle's fingerprint
    numerics: str  # identifies the machine's arithmetic: with equal values, a run computes equal bits
    position: int  # number of tokens that were fed to the state
    parent: str | None  # the state from which it was made
    origin: Origin
    created: float  # seconds since 1970, as all times here
    used: float  # when it was last read or made
    expires: float | None = None  # None: never
    pinned: bool = False  # never evicted
    metadata: dict[str, str] = field(default_factory=dict)
    turn: Turn = ""  # whose message of a conversation it ends with; "generated": the model's own; "": it ends with plain text
    sha256: str = ""  # hash of its blob
    size: int = 0  # bytes of its blob
    shared_by: int = 1  # number of states with the same blob
    status: Status = "ready"


class NameChange(NamedTuple):
    """Move a name to the state that is put. `version`: the name's expected version, 0 if it must be new; None: any."""

    name: str
    version: int | None = None


class Name(NamedTuple):
    """A name and the state it points to. The version counts its moves, from 1."""

    name: str
    state: str
    version: int


class IdempotencyKey(NamedTuple):
    """The client's key of a request, and a digest of the request's content."""

    key: str
    digest: str


class Quota(NamedTuple):
    """The limits of one tenant. The bytes of a blob that several states share count once; bytes of documents count too."""

    states: int
    size: int


class Usage(NamedTuple):
    """The amount that a tenant keeps. `size`: bytes of its blobs and documents."""

    states: int = 0
    size: int = 0
    pinned_size: int = 0


class StoredBlob(NamedTuple):
    """The bytes of one or more states of a tenant. `sha256`: the hash that they had when they were kept."""

    sha256: str
    content: bytes
    states: int


class Filter(NamedTuple):
    """The selection of a tenant's states for a list, newest first. `after`: the id of the last state of the previous page."""

    name: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    model: str | None = None
    after: str | None = None
    limit: int = 20


class Patch(NamedTuple):
    """Changes to a state; None leaves a field as it is. `expires` is a time, or math.inf for never."""

    expires: float | None = None
    pinned: bool | None = None
    metadata: dict[str, str] | None = None


class Ancestor(NamedTuple):
    """One step of a lineage. `ids`: the tokens that it has seen beyond its parent, as little-endian int32."""

    record: StateRecord
    ids: bytes


class StateReference(NamedTuple):
    """A state to continue. `exact`: refuse it if this machine's arithmetic may give other bits than the one that made it."""

    tenant: str
    id: str
    exact: bool = True


@dataclass(frozen=True, kw_only=True)
class Keep:
    """How to keep the state after a run's last token. The generator fills in the record's `position` and `numerics`."""

    record: StateRecord
    quota: Quota
    name: NameChange | None = None
    key: IdempotencyKey | None = None


@dataclass(frozen=True, kw_only=True)
class Document:
    """A small row of JSON beside the states, such as a response, a conversation or a run. Its key is tenant, kind and id."""

    kind: str
    id: str
    tenant: str
    body: bytes
    version: int = 0  # number of its writes; 0: not written yet
    due: float | None = None  # time at which a sweep should handle it, such as the end of a lease; None: never
    expires: float | None = None  # None: never
