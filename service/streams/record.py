"""The stored data of a run. It is two documents: the request (kind `run_request`) and the run's progress (kind `run`)."""

import secrets
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import orjson

Status = Literal["in_progress", "completed", "failed"]

RUN_KIND, REQUEST_KIND = "run", "run_request"


def new_run_id() -> str:
    """Return an id of 128 random bits, which cannot be guessed."""
    return f"run_{secrets.token_hex(16)}"


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The data of a run that never change after its beginning."""

    id: str
    tenant: str  # "" if no keys are set
    path: str  # path of the route
    body: bytes  # the request's JSON, with its defaults filled in
    seeds: tuple[int, ...]  # one seed for each prompt, drawn at random if the request had none
    answer_id: str  # id of the answer, in the dialect's format
    created: int  # Unix time of the answer
    model: str
    fingerprint: str  # fingerprint of the model's bundle
    numerics: str  # fingerprint of the machine's arithmetic: machines with equal fingerprints compute equal bits

    def head(self) -> dict[str, Any]:
        """Return the fields for the document of kind `run`. The tenant and the id are the document's key, and the body is in the other
        document."""
        fields = asdict(self)
        for name in ("id", "tenant", "body"):
            del fields[name]
        return fields


@dataclass(kw_only=True)
class Progress:
    """The progress of a run. `tokens` has the token ids drawn so far, by choice. `ended` has whether each choice is complete."""

    tokens: list[list[int]]
    ended: list[bool]
    status: Status = "in_progress"

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.tokens))


def pack(start: RunStart, progress: Progress, owner: str) -> bytes:
    """Return the document of kind `run`. `owner`: id of the stream that may send the run; "" if no stream sends it."""
    tokens = [b64encode(np.array(ids, "<i4").tobytes()).decode() for ids in progress.tokens]
    return orjson.dumps({**start.head(), "owner": owner, "status": progress.status, "tokens": tokens, "ended": progress.ended})


def unpack(id: str, tenant: str, run: bytes, request: bytes) -> tuple[RunStart, Progress]:
    """Return the run from its two documents: the inverse of `pack`."""
    fields = orjson.loads(run)
    del fields["owner"]
    tokens = [np.frombuffer(b64decode(ids), "<i4").tolist() for ids in fields.pop("tokens")]
    progress = Progress(tokens=tokens, ended=fields.pop("ended"), status=fields.pop("status"))
    return RunStart(id=id, tenant=tenant, body=request, **{**fields, "seeds": tuple(fields["seeds"])}), progress


def owner_of(run: bytes) -> str:
    """Return the owner in the document of a run; "" if it has none."""
    return str(orjson.loads(run).get("owner", ""))
