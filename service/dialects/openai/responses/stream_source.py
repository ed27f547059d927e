"""Reads a response up to its end, for a stream or a whole answer.

It is read from a `Live` object if the reader has one in this process, otherwise from its row in the store.
"""

import asyncio
import time

from service.catalog import Catalog
from service.dialects.openai.responses.answer import Answer
from service.dialects.openai.responses.live import Live
from service.dialects.openai.responses.stored import Row, find
from service.dialects.states.finding import store_of
from service.errors import ServiceError

_POLL_S = 0.5  # seconds between two reads of a row that another process writes
_PATIENCE_S = 60.0


class StoredView:
    """A response that is read from the store, such as one of another process or one that has ended. It can be used in place of a `Live`."""

    error: ServiceError | None = None

    def __init__(self, catalog: Catalog, row: Row) -> None:
        self._catalog = catalog
        self._show(row)

    def _show(self, row: Row) -> None:
        self._row, self.answer, self.ended = row, row.answer(), row.ended

    async def read(self) -> bool:
        """Read the stored row, and return whether it has changed. Raises ResponseNotFound if the response was deleted."""
        before = self._row
        row = await store_of(self._catalog).call(lambda engine: find(engine, before.tenant, before.id))
        self._show(row)
        return row.version != before.version

    async def wait(self, timeout_s: float) -> None:
        """Wait until the stored row has changed, at most `timeout_s` seconds. Raises ResponseNotFound if the response was deleted."""
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            await asyncio.sleep(min(_POLL_S, left_s))
            if await self.read():
                return


class Follower:
    """Reads a response up to its end.

    `owner`: this follower serves the request that created the response, and the response is not in the background. Closing the owner stops
    the response. If the response fails, the owner raises the error, in a stream only before the first token.
    """

    def __init__(self, catalog: Catalog, view: Live | StoredView, *, owner: bool = False, streamed: bool = True, seen: int = 0) -> None:
        """`seen`: the number of tokens that the client has received before."""
        self.done = False
        self._catalog = catalog
        self._view = view
        self._owner, self._streamed = owner, streamed
        self._seen = seen
        self._begun = False
        self._not_before = 0.0

    @property
    def answer(self) -> Answer:
        return self._view.answer

    async def take(self, timeout_s: float = _PATIENCE_S, interval_s: float = 0.0) -> list[Answer]:
        """Wait for new tokens or the end of the response. Return a list with only the response, or [] after `timeout_s` seconds.

        New tokens are then returned at the earliest `interval_s` seconds later, unless the response has ended.
        """
        until = time.monotonic() + timeout_s
        while True:
            view, now = self._view, time.monotonic()
            if isinstance(view, Live) and view.lost and view.ended:
                assert view.lease is not None
                self._view = stored = StoredView(self._catalog, view.lease.row)
                await stored.read()
            elif view.ended or (view.answer.said.count > self._seen and now >= self._not_before):
                return self._taken(view, now + interval_s)
            elif now >= until:
                self._hear()
                return []
            else:
                gathering = view.answer.said.count > self._seen
                await view.wait(min(until, self._not_before if gathering else until) - now)

    async def whole(self) -> Answer:
        """Wait for the end of the response, and return it. The owner raises the error of a response that failed. If this fails or is
        cancelled (the client disconnects), stop reading."""
        try:
            while not self.done:
                await self.take()
        except BaseException:
            self.close()
            raise
        if self._owner and self._view.error is not None:
            raise self._view.error
        return self.answer

    def close(self) -> None:
        """Stop reading. The owner also stops the response, which another process continues if it can, for a request with the same key."""
        if self._owner and isinstance(self._view, Live):
            self._view.stop("released")

    def _taken(self, view: Live | StoredView, not_before: float) -> list[Answer]:
        self._seen, self._not_before = view.answer.said.count, not_before
        self.done = view.ended
        if self._owner and view.error is not None and not (self._begun or self._seen):
            raise view.error
        self._hear()
        return [view.answer]

    def _hear(self) -> None:
        self._begun = True
        if isinstance(self._view, Live) and self._streamed:
            self._view.heard = True
