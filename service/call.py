"""The data of one request except its body: client, deadline, lane, accounting, and the headers of its answer."""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from service.errors import InvalidRequest, NeverFits
from service.overload.byte_shares import ByteShares
from service.runtime.lanes import Lane, Spent
from service.tokenization.texts import Cutting

TIMEOUT_HEADER = "x-request-timeout-ms"
LANE_HEADER = "x-lane"
SESSION_HEADER = "x-session-id"
RECEIVED_HEADER = "x-received-ms"  # time when the proxy on this machine received the request, in milliseconds since the epoch
CONNECTION_HEADER = "x-connection"  # the client's `address:port`; the proxy in front replaces any value that a client sends
MODEL_HEADER = "x-model"
JSON_LENGTH_HEADER = "inference-header-content-length"  # bytes of the JSON at the beginning of a body that has binary tensors after it
LAST_EVENT_HEADER = "last-event-id"
RUN_HEADER = "x-run-id"
ITEM_ERRORS_HEADER = "x-item-errors"
TRUNCATED_HEADER = "x-truncated-inputs"
WARNINGS_HEADER = "x-warnings"
IDEMPOTENCY_HEADER = "idempotency-key"
SPACE_MATCH_HEADER = "x-embedding-space-match"
_OPTIONAL = frozenset(
    (
        SPACE_MATCH_HEADER,
        TIMEOUT_HEADER,
        LANE_HEADER,
        MODEL_HEADER,
        SESSION_HEADER,
        IDEMPOTENCY_HEADER,
        LAST_EVENT_HEADER,
        ITEM_ERRORS_HEADER,
    )
)
NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_MOMENT = re.compile(r"[0-9]{1,15}")
_SESSION = re.compile(r"[\x21-\x7e]{1,128}")
LARGE_BYTES = 262_144  # an answer whose estimated size in bytes is larger than this is sent in pieces
NUMBER_BYTES = 12  # estimated bytes of a float32 and its comma in JSON
_MOST_REPORTED = 3_500  # largest length of the header x-truncated-inputs in characters, because clients accept response heads of 8 KB


class CallTenant(Protocol):
    """The tenant that a request's API key belongs to; see `service/http/tenants.py`."""

    name: str

    async def begin_stream(self, call: "Call") -> None: ...

    def charge(self, call: "Call") -> None: ...

    def settle(self, call: "Call", status: int) -> None: ...

    def headers(self) -> list[tuple[bytes, bytes]]: ...


@dataclass(slots=True)
class Call:
    """The state of one request. Created at the edge, filled while the request is handled, read when the answer is sent."""

    request_id: str
    started: float
    deadline: float = math.inf
    lane: Lane | None = None  # None until the header, the body or the number of inputs decides
    wanted: str | None = None  # the model named by the URL or a header; a model in the body has precedence
    by_path: bool = False  # whether the URL's path names `wanted`. If so, the `model` of the body is ignored
    session: str = ""  # requests of one session go to the same replica of a pool; "" if the request has no session
    client: str = ""  # the tenant, or the connection if no API keys are set: queues and slots are shared fairly between clients
    host: str = ""  # the tenant, or the client's address if no API keys are set: memory is shared fairly between hosts
    tenant: "CallTenant | None" = None  # owner of the request's API key; None if no API keys are set
    key: str = ""  # name of the request's API key
    idempotency_key: str | None = None  # value of the header Idempotency-Key, on routes that read this header
    last_event_id: str | None = None  # id of the last event that the client received, if it continues a stream
    priming: bool = False  # whether a stream begins with an event that contains nothing but its id
    space: str | None = None  # the embedding spaces that the answer must have; see `service/encoding/space.py`
    item_errors: bool = False
    ndjson: bool = False
    arrow: bool = False
    model: str = ""
    tokens: int = 0
    completion_tokens: int = 0  # number of generated tokens; `tokens` includes them
    charged: int = 0  # tokens that were charged to the tenant's limit so far
    streaming: bool = False  # whether the answer counts towards the tenant's limit of concurrent streams
    characters: int = 0
    content: int = 0  # hash of the body, by which a gateway recognises a request that is sent again
    body_bytes: int = 0
    body_checked: bool = False  # whether the body is known to parse without blocking the event loop for long
    answer_bytes: int = 0  # bytes reserved for the answer; 0 unless it is large
    tokenization_s: float = 0.0
    spent: Spent = field(default_factory=Spent)
    headers: dict[str, str] = field(default_factory=dict)
    trace_id: str | None = None  # None if requests are not traced
    traceparent: str | None = None  # header value for the request's span; None if this request is not traced
    # Called when an engine or a route takes the deadline over, or the answer begins. Until then the edge ends the request at its deadline.
    pass_on_deadline: Callable[[], None] = lambda: None

    @property
    def tenant_name(self) -> str:
        """Return the name of the tenant, or "" if no API keys are set."""
        return "" if self.tenant is None else self.tenant.name

    @property
    def origin(self) -> dict[str, Any]:
        """Return the fields of the `Origin` of a request to an engine."""
        return {
            "lane": Lane.INTERACTIVE if self.lane is None else self.lane,
            "deadline": self.deadline,
            "client": self.client,
            "tenant": self.tenant_name,
            "traceparent": self.traceparent,
        }

    @property
    def identity(self) -> dict[str, str]:
        """Return the fields of a log record that identify this request."""
        return {"request_id": self.request_id} | ({} if self.trace_id is None else {"trace_id": self.trace_id})

    async def begin_stream(self) -> None:
        """Count the answer as one of the tenant's open streams. Raises RateLimited if the tenant has too many open streams."""
        if self.tenant is not None:
            await self.tenant.begin_stream(self)

    def report(self, truncated: Sequence[Cutting], query: Cutting | None = None) -> None:
        """Set the header `x-truncated-inputs`. Example: `2; 0:812>256, 5:600>256` means that 2 inputs were cut to 256 tokens: input 0,
        which had 812 tokens, and input 5, which had 600.

        If the query of a rerank request was cut, its entry comes before those of the documents: `1; query:812>256`.
        """
        cut = [] if query is None else [f"query:{query.tokens}>{query.kept}"]
        cut += [f"{one.index}:{one.tokens}>{one.kept}" for one in truncated]
        named = ", ".join(cut)
        if len(named) > _MOST_REPORTED:
            named = f"{named[:_MOST_REPORTED].rpartition(', ')[0]}, ..."
        self.headers[TRUNCATED_HEADER] = f"{len(cut)}; {named}" if cut else "0"


def read_headers(call: Call, headers: Mapping[str, str], timeout_s: float) -> None:
    """Set the fields of `call` that headers set. Raises an InvalidRequest that names a header with an invalid value."""
    call.deadline = call.started + timeout_s
    accepted = headers.get("accept", "")
    call.ndjson, call.arrow = NDJSON in accepted, ARROW in accepted
    if _OPTIONAL.isdisjoint(headers):  # as in most requests
        return
    call.deadline = call.started + _timeout(headers.get(TIMEOUT_HEADER), timeout_s)
    call.lane = _lane(headers.get(LANE_HEADER))
    call.wanted = headers.get(MODEL_HEADER) or None
    call.space = headers.get(SPACE_MATCH_HEADER) or None
    call.session = _session(headers.get(SESSION_HEADER))
    call.idempotency_key = headers.get(IDEMPOTENCY_HEADER)
    call.last_event_id = headers.get(LAST_EVENT_HEADER) or None
    call.item_errors = headers.get(ITEM_ERRORS_HEADER, "").lower() in ("1", "true")


def expect(call: Call, size_bytes: float, limit: int, shares: ByteShares, what: str) -> None:
    """Reserve about `size_bytes` more memory for the answer of the call. `what` describes the answer's content in error messages.

    Raises NeverFits if the answer exceeds `limit` bytes. Raises Overloaded if the client's large answers in progress use up its share of
    the memory.
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
    """Return the seconds since the proxy in front of this process received the request, or 0 without a proxy."""
    received = headers.get(RECEIVED_HEADER, "")
    return max(time.time() - int(received) / 1000, 0.0) if _MOMENT.fullmatch(received) else 0.0


def _timeout(value: str | None, default_s: float) -> float:
    if value is None:
        return default_s
    timeout_ms = float(value) if _NUMBER.fullmatch(value) else math.nan
    if not 0 < timeout_ms <= 86_400_000:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER}={value!r} is not a number of milliseconds above 0 and at most 86400000", param=TIMEOUT_HEADER
        )
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
        raise InvalidRequest(f"{LANE_HEADER}={value!r} is not a lane: choose interactive or bulk", param=LANE_HEADER) from None
