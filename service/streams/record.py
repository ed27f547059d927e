"""What the store keeps of a run: two documents, the request (kind `run_request`) and the run's progress (kind `run`)."""

import secrets
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import orjson

Status = Literal["in_progress", "completed", "failed", "cancelled"]
Durability = Literal["turn", "checkpoint", "none"]

RUN_KIND, REQUEST_KIND = "run", "run_request"


def new_run_id() -> str:
    """128 random bits, so that an id cannot be guessed."""
    return f"run_{secrets.token_hex(16)}"


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """All of a run that never changes."""

    id: str
    tenant: str  # "" if no keys are set
    path: str  # of the route
    body: bytes  # the request's JSON, with its defaults filled in
    seeds: tuple[int, ...]  # one for each prompt, drawn if the request had none
    answer_id: str  # of the answer, as the dialect has it
    created: int  # Unix time of the answer
    model: str
    fingerprint: str  # of the bundle
    numerics: str  # of the machine's arithmetic: equal values promise equal bits

    def head(self) -> dict[str, Any]:
        """The fields for the document of kind `run`; the tenant and the id are its key, and the body has a document of its own."""
        fields = asdict(self)
        for name in ("id", "tenant", "body"):
            del fields[name]
        return fields


@dataclass(kw_only=True)
class Progress:
    """How far a run has come. `tokens`: the ids drawn so far, by choice; a choice that has `ended` has no more."""

    tokens: list[list[int]]
    ended: list[bool]
    status: Status = "in_progress"

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.tokens))


def pack(start: RunStart, progress: Progress, owner: str) -> bytes:
    """The document of kind `run`. `owner`: who may send the run; "" if nobody does."""
    tokens = [b64encode(np.array(ids, "<i4").tobytes()).decode() for ids in progress.tokens]
    return orjson.dumps({**start.head(), "owner": owner, "status": progress.status, "tokens": tokens, "ended": progress.ended})


def unpack(id: str, tenant: str, run: bytes, request: bytes) -> tuple[RunStart, Progress]:
    """The inverse of `pack`."""
    fields = orjson.loads(run)
    del fields["owner"]
    tokens = [np.frombuffer(b64decode(ids), "<i4").tolist() for ids in fields.pop("tokens")]
    progress = Progress(tokens=tokens, ended=fields.pop("ended"), status=fields.pop("status"))
    return RunStart(id=id, tenant=tenant, body=request, **{**fields, "seeds": tuple(fields["seeds"])}), progress


def owner_of(run: bytes) -> str:
    """The owner in a document of kind `run`."""
    return str(orjson.loads(run)["owner"])
