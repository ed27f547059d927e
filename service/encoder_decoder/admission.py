"""Admission to the queue of an encoder-decoder. It estimates how long a source waits for its rows; all other rules are shared with
decoders.
"""

from collections import Counter

from service.encoder_decoder.batch import Source
from service.generation.admission import Admission, Holding
from service.runtime.lanes import Lane


class SourceAdmission(Admission[Source]):
    """A queue of sources. A source keeps its rows until its outputs are complete."""

    def _wait_s(self, client: str, lane: Lane, holding: Holding, slots: int) -> float:
        """Return the estimated seconds until a new source gets its rows. All waiting sources of its own client get their rows before it,
        and each other client gets at most as many rows as its own client, the new source included.
        """
        by_client = Counter[str]()
        for each in self._submissions:
            if each.lane <= lane:
                by_client[each.client] += each.slots
        own = by_client.pop(client, 0)
        ahead = own + sum(min(rows, own + slots) for rows in by_client.values()) + slots - holding.free
        return max(ahead, 0) * holding.turn_s / holding.slots if len(self) else 0.0

    def _full(self, waiting: int, tokens: int) -> str:
        return f"{waiting} sources wait, and the most is {self._limits.max_waiting}"
