"""Two lanes: interactive work passes bulk work. And the time that a request spent in them."""

from dataclasses import dataclass
from enum import IntEnum


class Lane(IntEnum):
    INTERACTIVE = 0
    BULK = 1


@dataclass(slots=True)
class Spent:
    """Seconds the inputs of one request waited and were computed, summed over the inputs. What the cache knew took none."""

    queue_s: float = 0.0
    inference_s: float = 0.0
