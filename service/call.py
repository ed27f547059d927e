"""What belongs to one request beside its body: who, until when, which lane, and what the answer's headers will say."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service.batching import Lane, Spent
from service.errors import InvalidRequest
from service.tokenization import Cutting

TIMEOUT_HEADER = "x-request-timeout-ms"
LANE_HEADER = "x-lane"
ITEM_ERRORS_HEADER = "x-item-errors"
TRUNCATED_HEADER = "x-truncated-inputs"
NDJSON = "application/x-ndjson"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_MOST_REPORTED = 64  # inputs named in a header; the count before them is always complete


@dataclass(slots=True)
class Call:
    """Made at the edge, filled on the way, read when the answer leaves."""

    request_id: str
    started: float
    deadline: float = math.inf
    lane: Lane | None = None
    item_errors: bool = False
    ndjson: bool = False
    model: str = ""
    tokens: int = 0
    characters: int = 0
    body_bytes: int = 0
    tokenization_s: float = 0.0
    spent: Spent = field(default_factory=Spent)
    headers: dict[str, str] = field(default_factory=dict)

    def report(self, truncated: Sequence[Cutting]) -> None:
        """Say in a header which inputs were cut: `2; 0:812>256, 5:600>256` is two inputs, with their tokens before and after."""
        if truncated:
            named = ", ".join(f"{one.index}:{one.tokens}>{one.kept}" for one in truncated[:_MOST_REPORTED])
            self.headers[TRUNCATED_HEADER] = f"{len(truncated)}; {named}" + (", ..." if len(truncated) > _MOST_REPORTED else "")
        else:
            self.headers[TRUNCATED_HEADER] = "0"


def from_headers(headers: Mapping[str, str], request_id: str, timeout_s: float) -> Call:
    """The call that these request headers describe. InvalidRequest names the header that cannot be meant."""
    started = time.monotonic()
    return Call(
        request_id=request_id,
        started=started,
        deadline=started + _timeout(headers.get(TIMEOUT_HEADER), timeout_s),
        lane=_lane(headers.get(LANE_HEADER)),
        item_errors=headers.get(ITEM_ERRORS_HEADER, "").lower() in ("1", "true"),
        ndjson=NDJSON in headers.get("accept", ""),
    )


def _timeout(value: str | None, default_s: float) -> float:
    if value is None:
        return default_s
    timeout_ms = float(value) if _NUMBER.fullmatch(value) else math.nan
    if not 0 < timeout_ms <= 86_400_000:
        raise InvalidRequest(f"{TIMEOUT_HEADER}={value!r} is not a number of milliseconds between 0 and 86400000", param=TIMEOUT_HEADER)
    return min(timeout_ms / 1000, default_s)


def _lane(value: str | None) -> Lane | None:
    if value is None:
        return None
    try:
        return Lane[value.upper()]
    except KeyError:
        raise InvalidRequest(f"{LANE_HEADER}={value!r} is not a lane: interactive or bulk", param=LANE_HEADER) from None
