"""The two lanes of every queue, and the times for which a request was queued and computed."""

from dataclasses import dataclass
from enum import IntEnum


class Lane(IntEnum):
    """The priority of a request. Interactive requests overtake bulk requests."""

    INTERACTIVE = 0
    BULK = 1


@dataclass(slots=True)
class Spent:
    """The seconds for which the inputs of one request were queued and were computed, summed over the inputs. Cached inputs count as 0."""

    queue_s: float = 0.0
    inference_s: float = 0.0
