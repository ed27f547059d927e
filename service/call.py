"""One request beside its body: its client, deadline and lane, its account, and the headers of its answer."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.errors import InvalidRequest, NeverFits
from service.overload.byte_shares import ByteShares
from service.runtime.lanes import Lane, Spent
from service.tokenization.texts import Cutting

TIMEOUT_HEADER = "x-request-timeout-ms"
LANE_HEADER = "x-lane"
SESSION_HEADER = "x-session-id"
RECEIVED_HEADER = "x-received-ms"  # since the epoch: when the proxy on this machine had the request
CONNECTION_HEADER = "x-connection"  # the client's `address:port`, which the proxy in front of this process overwrites on every request
MODEL_HEADER = "x-model"
ITEM_ERRORS_HEADER = "x-item-errors"
TRUNCATED_HEADER = "x-truncated-inputs"
NDJSON = "application/x-ndjson"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_MOMENT = re.compile(r"[0-9]{1,15}")
_SESSION = re.compile(r"[\x21-\x7e]{1,128}")
LARGE_BYTES = 262_144  # an answer with a larger estimate is written in pieces
NUMBER_BYTES = 12  # of a float32 in JSON, with its comma
_MOST_REPORTED = 3_500  # characters of inputs named in a header, since clients take heads of 8 KB; the count before them is always complete


class Tenant(Protocol):
    """The owner of keys; see `service/http/tenants.py`."""

    name: str

    def begin_stream(self, call: "Call") -> None: ...

    def charge(self, call: "Call") -> None: ...

    def settle(self, call: "Call", status: int) -> None: ...

    def headers(self) -> list[tuple[bytes, bytes]]: ...


@dataclass(slots=True)
class Call:
    """Made at the edge, filled on the way, read when the answer leaves."""

    request_id: str
    started: float
    deadline: float = math.inf
    lane: Lane | None = None
    bulk: bool = False  # queued in the bulk lane
    wanted: str | None = None  # the model that the URL or a header names; one that the body names counts more
    by_path: bool = False  # `wanted` is of the path: it counts more than the body's, which clients of such a URL fill with any word
    session: str = ""  # requests of one session go to the same replica of a pool; "": to one with little to do
    client: str = ""  # owner of the share of queues and slots: the tenant, or the connection if no keys are set
    host: str = ""  # owner of the share of bytes: the tenant, or the address if no keys are set
    tenant: "Tenant | None" = None  # of the request's key; None if no keys are set
    key: str = ""  # the name of that key
    item_errors: bool = False
    ndjson: bool = False
    model: str = ""
    tokens: int = 0
    completion_tokens: int = 0  # of these
    charged: int = 0  # of these, to the tenant's limit
    streaming: bool = False  # as one of the tenant's streams
    characters: int = 0
    body_bytes: int = 0
    body_checked: bool = False  # that reading it does not hold the event loop
    answer_bytes: int = 0  # reserved for a large answer
    tokenization_s: float = 0.0
    spent: Spent = field(default_factory=Spent)
    headers: dict[str, str] = field(default_factory=dict)
    trace_id: str | None = None  # where requests are traced
    traceparent: str | None = None  # of the request's span, where this one is

    @property
    def identity(self) -> dict[str, str]:
        """What finds this request again, in a log record."""
        return {"request_id": self.request_id} | ({} if self.trace_id is None else {"trace_id": self.trace_id})

    def begin_stream(self) -> None:
        """The answer will be a stream. RateLimited where the tenant has too many."""
        if self.tenant is not None:
            self.tenant.begin_stream(self)

    def report(self, truncated: Sequence[Cutting], query: Cutting | None = None) -> None:
        """Say in a header which inputs were cut: `2; 0:812>256, 5:600>256` is two inputs, with their tokens before and after.

        A query that was cut stands before the documents: `1; query:812>256`.
        """
        cut = [] if query is None else [f"query:{query.tokens}>{query.kept}"]
        cut += [f"{one.index}:{one.tokens}>{one.kept}" for one in truncated]
        named = ", ".join(cut)
        if len(named) > _MOST_REPORTED:
            named = f"{named[:_MOST_REPORTED].rpartition(', ')[0]}, ..."
        self.headers[TRUNCATED_HEADER] = f"{len(cut)}; {named}" if cut else "0"


def from_headers(headers: Mapping[str, str], request_id: str, timeout_s: float) -> Call:
    """The call that these request headers describe. InvalidRequest names the header that cannot be meant."""
    started = time.monotonic()
    return Call(
        request_id=request_id,
        started=started,
        deadline=started + _timeout(headers.get(TIMEOUT_HEADER), timeout_s),
        lane=_lane(headers.get(LANE_HEADER)),
        wanted=headers.get(MODEL_HEADER) or None,
        session=_session(headers.get(SESSION_HEADER)),
        item_errors=headers.get(ITEM_ERRORS_HEADER, "").lower() in ("1", "true"),
        ndjson=NDJSON in headers.get("accept", ""),
    )


def expect(call: Call, size_bytes: float, limit: int, shares: ByteShares, what: str) -> None:
    """Reserve about `size_bytes` more for the call's answer. `what` describes its content, with numbers, for errors.

    Raises NeverFits over `limit`, and Overloaded if large answers that are still being sent fill the client's share.
    """
    size = int(size_bytes)
    if call.answer_bytes + size > limit:
        raise NeverFits(
            f"the answer would have about {call.answer_bytes + size} bytes ({what}), and the most is {limit}: ask for it in parts"
        )
    if size > LARGE_BYTES or call.answer_bytes:
        shares.take(call.host, size, call.answer_bytes)
        call.answer_bytes += size


def waited_s(headers: Mapping[str, str]) -> float:
    """How long the request has waited to be read since the proxy before this process had it; 0 where there is none."""
    received = headers.get(RECEIVED_HEADER, "")
    return max(time.time() - int(received) / 1000, 0.0) if _MOMENT.fullmatch(received) else 0.0


def _timeout(value: str | None, default_s: float) -> float:
    if value is None:
        return default_s
    timeout_ms = float(value) if _NUMBER.fullmatch(value) else math.nan
    if not 0 < timeout_ms <= 86_400_000:
        raise InvalidRequest(f"{TIMEOUT_HEADER}={value!r} is not a number of milliseconds above 0, 86400000 at most", param=TIMEOUT_HEADER)
    return min(timeout_ms / 1000, default_s)


def _session(value: str | None) -> str:
    if value is None:
        return ""
    if not _SESSION.fullmatch(value):
        raise InvalidRequest(f"{SESSION_HEADER} is not a name of 1 to 128 printable ASCII characters without spaces", param=SESSION_HEADER)
    return value


def _lane(value: str | None) -> Lane | None:
    if value is None:
        return None
    try:
        return Lane[value.upper()]
    except KeyError:
        raise InvalidRequest(f"{LANE_HEADER}={value!r} is not a lane: interactive or bulk", param=LANE_HEADER) from None
