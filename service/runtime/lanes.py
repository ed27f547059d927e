"""The two lanes of every queue, and the times that a request spent in the queue and in computation."""

from dataclasses import dataclass
from enum import IntEnum


class Lane(IntEnum):
    """The priority of a request. Interactive requests overtake bulk requests."""

    INTERACTIVE = 0
    BULK = 1


@dataclass(slots=True)
class Spent:
    """The seconds that the inputs of one request spent in the queue and in computation, summed over the inputs. An input whose
    row is in the cache counts as 0 s.
    """

    queue_s: float = 0.0
    inference_s: float = 0.0
