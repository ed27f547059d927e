"""One response while this process generates it."""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from service.call import Call
from service.catalog import Catalog
from service.dialects import generation
from service.dialects.openai.responses.answer import Answer, error_of, usage_of
from service.dialects.openai.responses.preparing import Prepared
from service.dialects.openai.responses.rows import LEASE_S, ResponseNotFound, Row, drop_state, ended, find
from service.dialects.openai.responses.said import Said, Saying
from service.dialects.states import turns
from service.dialects.states.finding import store_of
from service.dialects.states.keeping import quota_of
from service.errors import DocumentMoved, NotReady, Overloaded, ServiceError, StoreFailed
from service.generation.runs import Runs
from service.http.edge import INTERNAL_ERROR
from service.states.store import GroupingEngine

log = logging.getLogger("attnserve")

_PROGRESS_S = 1.0  # between two writes of what a background response has said,
_BYTES_PER_S = 100_000.0  # and so many bytes of that a second at most
_UNHURRIED_S = 0.25  # seconds between two reads of a response without a stream
_LARGE_TOKENS = 20_000  # a row with more is serialised on a thread
_LONGEST_RETRY_S = 30.0

Why = Literal["cancelled", "released"]


class Live:
    """A response, its run and its row. Used on the event loop.

    It ends when its row is written for the last time. It is `lost` when the store knows more than this process: another one owns the
    response, it was deleted, or it waits for an owner.
    """

    def __init__(
        self, catalog: Catalog, prepared: Prepared, answer: Answer, call: Call, *, row: Row | None, streamed: bool, said: Said | None = None
    ) -> None:
        """`row`: the stored response, None if it is not stored. `said`: what was said by an owner before."""
        self.answer = answer
        self.ended = self.lost = False
        self.heard = False  # a client has read some of its stream
        self.error: ServiceError | None = None
        self.row = row
        self.background: bool = answer.head["background"]
        self.call = call
        self._catalog = catalog
        self._prepared = prepared
        self._streamed = streamed
        self._cached = 0
        self._numerics = "" if row is None else row.numerics
        self._written = 0.0  # when the row was written, by the monotonic clock
        self._next_write = 0.0
        self._written_count = 0
        self._why: Why = "cancelled"
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._begin_saying(said)

    def start(self) -> asyncio.Task[None]:
        self._written = time.monotonic()
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(lambda task: self._over())
        return self._task

    def stop(self, why: Why = "cancelled") -> None:
        """End the generation. A response that is `released` waits for another owner, and a cancelled one has ended."""
        if self._task is not None and not self.ended:
            self._why = why
            asyncio.get_running_loop().call_soon(self._task.cancel)  # a task that is cancelled before its first step writes nothing

    async def wait(self, timeout_s: float) -> None:
        """Wait for something new."""
        news = self._news
        with suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), timeout_s)

    # Generating --------------------------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            try:
                await self._generate()
            except asyncio.CancelledError:
                if self._why == "released":
                    await self._release(0.0)
                else:
                    await self._end("cancelled")
            except (Overloaded, NotReady) as error:
                if not self.background:
                    raise
                lost = isinstance(error, NotReady)  # perhaps with this response
                await self._release(LEASE_S if lost else min(error.retry_after_s, _LONGEST_RETRY_S), to_blame=lost)
        except _Lost:
            await self._forget()
        except StoreFailed as error:
            if not self.background:
                await self._fail(error)
            self.lost = self.background  # when its lease has ended, a process goes on from what is in the store
        except Exception as error:
            await self._fail(error)

    def _over(self) -> None:
        self.ended = True
        self._tell()
        if self.background and self.call.tenant is not None:
            self.call.tenant.settle(self.call, 200)

    async def _generate(self) -> None:
        await self._run()
        status = "completed" if self._saying.finish_reason == "stop" else "incomplete"
        state = turns.kept(self._prepared.request)
        await self._end(
            status,
            completed_at=generation.now() if status == "completed" else None,
            incomplete_details=None if status == "completed" else {"reason": "max_output_tokens"},
            **({} if state is None else {"state": state}),
        )

    async def _run(self) -> None:
        """Generate up to the last token."""
        settings = self._catalog.settings
        known = tuple(self._saying.ids)
        # The tokens after known ones may be with clients already, so they are drawn by the same arithmetic.
        numerics = self.row.numerics if self.row is not None and known else ""
        asked = replace(self._prepared.request, known=known, numerics=numerics)
        runs = await Runs.submit(self._prepared.model, [asked], self.call, n=1, prompt_field="input", stream=False)
        self._numerics = runs.runs[0].numerics or self._prepared.model.engine.numerics
        interval_s = settings.stream_interval_s if self._streamed or self.background else _UNHURRIED_S
        try:
            while not runs.done:
                taken = await runs.take(LEASE_S / 3 if self.background else None, interval_s)
                if self.background and time.monotonic() - self._written > LEASE_S:
                    await self._progress()  # this process may have been paused: it says nothing before it knows that it is the owner
                for _, delta in taken:
                    self._saying.add(delta)
                self._cached = runs.cached_tokens
                if taken:
                    self.answer.status = "in_progress"
                    self._tell()
                if self.background and not runs.done:
                    await self._progress_if_due()
        finally:
            runs.close()

    def _begin_saying(self, said: Said | None) -> None:
        self._saying = Saying(self._prepared.model, self._prepared.request)
        if said is not None:
            self._saying.resume(said)
        self.answer.said = self._saying

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # Ends --------------------------------------------------------------------------------------------------------------------------------

    async def _end(self, status: str, **fields: Any) -> None:
        """Write the response for the last time, then show that it has ended."""
        position = self._prepared.position
        usage = usage_of(position + len(self._prepared.request.prompt), position + self._cached, self._saying.count)
        answer = Answer({**self.answer.head, "usage": usage, **fields}, self._saying, self.answer.call)
        answer.status = status
        if self.row is not None:
            await self._write(replace(self._now(answer), ids=[], work=None, due=None))
        self.answer.head, self.answer.status = answer.head, status

    async def _fail(self, error: Exception) -> None:
        """End with an error. If the client has not received the response's id yet, delete the row: the client gets the error."""
        if isinstance(error, ServiceError):
            self.error = error
        else:
            log.error("unexpected error", extra=self.call.identity, exc_info=error)
            self.error = ServiceError(INTERNAL_ERROR)
        told = error_of(self.error)
        unheard = not self.background and not (self.heard or (self._streamed and self._saying.count))
        try:
            if self.row is not None and unheard:
                await self._erase()
            else:
                await self._end("failed", error=told)
        except _Lost:
            await self._forget()
        except ServiceError as failure:  # a sweep ends the row later
            log.warning("a failed response could not be stored", extra={**self.call.identity, "error": failure.code})
        self.answer.head, self.answer.status = {**self.answer.head, "error": told}, "failed"

    async def _release(self, retry_s: float, *, to_blame: bool = False) -> None:
        """Give the response up: another process, or this one later, goes on with it from what was said so far.

        `to_blame`: the response may be the reason why it could not be generated.
        """
        assert self.row is not None
        self.lost = True
        row = self._now(self.answer)
        await self._write(replace(row, owners=row.owners - (not to_blame), due=time.time() + retry_s))

    async def _forget(self) -> None:
        """Note that another process owns the response. If it was deleted, its state has no owner."""
        self.lost = True
        assert self.row is not None
        row = self.row

        def clear(engine: GroupingEngine) -> None:
            try:
                find(engine, row.tenant, row.id)
            except ResponseNotFound:
                drop_state(engine, row)

        with suppress(ServiceError):
            await store_of(self._catalog).call(clear)

    # The row -----------------------------------------------------------------------------------------------------------------------------

    async def _progress_if_due(self) -> None:
        now = time.monotonic()
        grown = self._saying.count > self._written_count
        if (grown and now >= self._next_write) or now - self._written >= LEASE_S / 3:
            try:
                await self._progress()
            except StoreFailed:  # without a renewal, another process takes over; until then this one goes on
                self._next_write = now + _PROGRESS_S

    async def _progress(self) -> None:
        """Write what was said so far, and renew the lease."""
        count = self._saying.count
        size = await self._write(replace(self._now(self.answer), due=time.time() + LEASE_S))
        self._written_count = count
        self._next_write = time.monotonic() + _PROGRESS_S + size / _BYTES_PER_S

    def _now(self, answer: Answer) -> Row:
        assert self.row is not None
        said = answer.said
        raw = None if answer.call is None else said.text
        return replace(self.row, response=answer.response(), ids=said.ids.copy(), ends=said.ends.copy(), raw=raw, numerics=self._numerics)

    async def _write(self, row: Row) -> int:
        """Write the row if it has not changed since the last time. Returns its bytes. Raises _Lost if it has, or is gone."""
        document = await asyncio.to_thread(row.document) if len(row.ends) > _LARGE_TOKENS else row.document()
        quota, began = quota_of(self._catalog.settings), time.monotonic()
        writing = asyncio.ensure_future(store_of(self._catalog).call(lambda engine: engine.write(document, row.version, quota)))
        try:
            version = await _whatever_happens(writing)
        except DocumentMoved:
            raise _Lost from None
        finally:
            if writing.done() and not writing.cancelled() and writing.exception() is None:
                self.row = replace(row, version=writing.result())
                self._written = began
        assert version
        return len(document.body)

    async def _erase(self) -> None:
        assert self.row is not None
        row = self.row

        def erase(engine: GroupingEngine) -> None:
            with suppress(ServiceError):
                engine.erase(row.tenant, "response", row.id, row.version)
                drop_state(engine, row)

        await store_of(self._catalog).call(erase)


class _Lost(Exception):
    """The row was written by another process, or deleted."""


async def _whatever_happens(writing: "asyncio.Future[int]") -> int:
    """Wait for a write, also if this task is cancelled meanwhile: otherwise the version of the row would be unknown."""
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def failed(row: Row, error: ServiceError) -> Row:
    """Return the row of a response that cannot be generated."""
    return ended(row, "failed", error=error_of(error))
