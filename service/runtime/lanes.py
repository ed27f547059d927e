"""The two lanes of every queue, for whom a request is computed, and the times that it spent in the queue and in computation."""

import math
from dataclasses import dataclass
from enum import IntEnum


class Lane(IntEnum):
    """The priority of a request. Interactive requests overtake bulk requests."""

    INTERACTIVE = 0
    BULK = 1


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The base of requests to engines: for whom a request is computed, how urgently and until when."""

    lane: Lane = Lane.INTERACTIVE
    deadline: float = math.inf  # time limit, in seconds of `time.monotonic()`
    client: str = ""  # clients get equal shares of queues and slots; "": no client, so the request is not limited to a share
    tenant: str = ""  # owner of the request, who gets only cached rows and states that were computed for himself; "": no API keys are set
    traceparent: str | None = None  # W3C trace context of the API request; None: not traced


@dataclass(slots=True)
class Spent:
    """The seconds that the inputs of one request spent in the queue and in computation, summed over the inputs. An input whose
    row is in the cache counts as 0 s.
    """

    queue_s: float = 0.0
    inference_s: float = 0.0
