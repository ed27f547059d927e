"""The queue of one engine: requests enter by admission, and leave in batches. No thread and no clock: the owner passes the time."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.encoding.batching import BatchingQueue, QueuedInput
from service.overload.encoder import EncoderAdmission, EncoderLimits
from service.runtime.lanes import Lane
from service.runtime.offered import Offered

# A client's turn of bulk work, as a part of the tokens that are computed in `max_bulk_wait_s`. A request of at most one turn is computed
# whole before the next one.
_BULK_TURN = 1 / 8


@dataclass(frozen=True)
class Draw:
    """A batch for one run, the items dropped on the way to it, and whether the run is alone or leaves others in the queue."""

    batch: list[QueuedInput]
    dropped: list[QueuedInput]
    alone: bool
    leaves_some: bool

    @property
    def tokens(self) -> int:
        return sum(len(item.ids) for item in self.batch)


class EncoderQueue(BatchingQueue):
    """Used by one thread at a time: its owner holds a lock."""

    def __init__(self, limits: EncoderLimits, offered: Offered | None = None) -> None:
        turn_tokens = _BULK_TURN * limits.max_bulk_wait_s * limits.tokens_per_s
        super().__init__(limits.max_batch_tokens, limits.run_cost_tokens, limits.bulk_delay_s, turn_tokens)
        self.admission = EncoderAdmission(limits, self, offered or Offered())

    def enter(self, items: Sequence[QueuedInput], lane: Lane, now: float, deadline: float) -> None:
        """Queue all inputs of one request, or none: see `EncoderAdmission.admit`."""
        if items:
            self.admission.admit(sum(len(item.ids) for item in items), lane, now, items[0].client, deadline)
        for item in items:
            self.put(item)

    def draw(self, now: float) -> Draw:
        """The next batch. `ended` is called when its run ends."""
        self.max_batch_tokens, self.max_unstarted_s = self.admission.batch_bounds(now)
        batch, dropped = self.take(now)
        draw = Draw(batch, dropped, alone=not self.admission.running and not len(self), leaves_some=len(self) > 0)
        if batch:
            self.admission.started(draw.tokens, batch[0].lane, now)
        return draw

    def ended(self, draw: Draw, seconds: float, *, answered: bool) -> None:
        """The run of this batch took so long. Unless `answered`, it failed."""
        self.admission.ended(draw.tokens, seconds, measured=answered, queue_left=draw.leaves_some)
