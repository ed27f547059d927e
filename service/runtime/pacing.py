"""How often a stream sends messages. Each has a fixed cost, so when many streams are open, each sends larger ones less often."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

STREAM_S: Final = 0.004  # seconds between the messages of two streams: a message costs some 0.3 ms of a core, its client's part included
LONGEST_S: Final = 0.25  # longest interval that many streams cause
MOST_WAIT_S: Final = 0.004  # longest time for which an engine with few runs keeps tokens
LOADED_WAIT_S: Final = 0.01  # the same for an engine with many runs


def hand_over_s(interval_s: float) -> float:
    """Return how long an engine may keep tokens before it hands them over, for streams with `interval_s` seconds between two messages. Each
    time wakes the event loop, which takes 0.05 ms.
    """
    return min(interval_s / 8, MOST_WAIT_S)


def loaded_hand_over_s(wait_s: float, slots: int) -> float:
    """Return how long an engine with `slots` slots in use may keep tokens, if it may keep those of a few for `wait_s` seconds: longer, as
    each of many streams sends messages less often. 0 remains 0.
    """
    return max(wait_s, min(slots * STREAM_S / 8, LOADED_WAIT_S)) if wait_s else 0.0


class Pace:
    """The pace of the streams of one process. Used on its event loop."""

    def __init__(self) -> None:
        self._streams = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream as open within the `with` block."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def interval_s(self, least_s: float) -> float:
        """Return the least seconds between two messages of a stream: `least_s`, or longer if many streams are open. 0 remains 0."""
        return max(least_s, min(self._streams * STREAM_S, LONGEST_S)) if least_s else 0.0
