"""Generates one response in this process, and writes its progress and its end to the store."""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from service.call import Call
from service.catalog import Catalog
from service.dialects.openai.responses.answer import Answer, Said, Saying, error_of, usage_of
from service.dialects.openai.responses.preparing import Prepared
from service.dialects.openai.responses.stored import ResponseNotFound, Row, drop_state, ended, find, write
from service.dialects.states.finding import store_of
from service.dialects.states.records import quota_of
from service.dialects.text.answer import sequence_tokens, unix_time, window_warnings
from service.dialects.text.request import kept, tell_exactness
from service.errors import DocumentMoved, NotReady, Overloaded, ServiceError, StoreFailed
from service.generation.runs import Runs
from service.http.gate import INTERNAL_ERROR
from service.states.engine import StateEngine
from service.streams.lease import LEASE_S

log = logging.getLogger("attnserve")

_PROGRESS_S = 1.0  # shortest time between two writes of a background response's progress, in seconds
_BYTES_PER_S = 100_000.0  # limit on the bytes per second that are written for the progress of one response
_UNHURRIED_S = 0.25  # seconds for which new tokens are gathered if no client streams the response
_LARGE_TOKENS = 20_000  # a row with more tokens is serialised on a thread
_LONGEST_RETRY_S = 30.0

Why = Literal["cancelled", "released"]


class Live:
    """A response that this process generates, with its run in the engine and its row in the store. Use it on the event loop.

    `ended` is set when this process no longer generates the response. `lost` is set when the row in the store is newer than this object:
    another process owns the response, the response was deleted, or it waits for a new owner.
    """

    def __init__(
        self, catalog: Catalog, prepared: Prepared, answer: Answer, call: Call, *, row: Row | None, streamed: bool, said: Said | None = None
    ) -> None:
        """`row`: the stored response, None if it is not stored. `said`: the text that an earlier owner has generated, if any."""
        self.answer = answer
        self.ended = self.lost = False
        self.heard = False  # whether a client has read a part of the stream
        self.error: ServiceError | None = None
        self.row = row
        self.background: bool = answer.head["background"]
        self.unattended = self.background or said is not None  # whether no client waits for this process to answer a POST
        self.call = call
        self._catalog = catalog
        self._prepared = prepared
        self._streamed = streamed
        self._cached = 0
        self._numerics = "" if row is None else row.numerics
        self._written = 0.0  # time of the row's last write, by the monotonic clock
        self._next_write = 0.0
        self._written_count = 0
        self._why: Why | None = None  # why the generation was stopped; None if it was not stopped
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._begin_saying(said)

    @property
    def continuable(self) -> bool:
        """Return whether another process can continue the response."""
        return self.row is not None and self.row.work is not None

    @property
    def _unheard(self) -> bool:
        """Return whether a client waits for the answer to its POST, and has no part of it yet."""
        return not (self.unattended or self.heard or (self._streamed and self._saying.count))

    def start(self) -> asyncio.Task[None]:
        self._written = time.monotonic()
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(lambda task: self._over())
        return self._task

    def stop(self, why: Why = "cancelled") -> None:
        """Stop the generation. A cancelled response has ended. A released response waits in the store for another owner, or is cancelled if
        it is not `continuable`."""
        if self._task is not None and not self.ended and self._why is None:
            self._why = why
            asyncio.get_running_loop().call_soon(self._task.cancel)  # later, since a task cancelled before its first step writes nothing

    async def over(self) -> None:
        """Wait until this process no longer generates the response."""
        while not self.ended:
            await self.wait(LEASE_S)

    async def wait(self, timeout_s: float) -> None:
        """Wait for new tokens or the end of the response, at most `timeout_s` seconds."""
        news = self._news
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # not wait_for, which loses a cancellation that comes with the news (Python 3.11)
                await news.wait()

    # Generating --------------------------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            try:
                await self._generate()
            except asyncio.CancelledError:
                if self.row is not None and self.row.ended:  # the ended response is stored, and clients may have read it
                    return
                if self._why == "released" and self.continuable:
                    await self._release(0.0)
                else:
                    await self._end("cancelled")
            except (Overloaded, NotReady) as error:
                if self._unheard or not self.continuable:
                    raise
                lost = isinstance(error, NotReady)  # the engine was lost, perhaps because of this response
                await self._release(LEASE_S if lost else min(error.retry_after_s, _LONGEST_RETRY_S), to_blame=lost)
        except _Lost:
            await self._forget()
        except StoreFailed as error:
            if not self.unattended:
                await self._fail(error)
            self.lost = self.unattended  # when the lease has ended, some process continues the response from the stored row
        except Exception as error:
            await self._fail(error)

    def _over(self) -> None:
        self.ended = True
        self._tell()
        if self.unattended and self.call.tenant is not None:
            self.call.tenant.settle(self.call, 200)

    async def _generate(self) -> None:
        await self._run()
        status = "completed" if self._saying.finish_reason == "stop" else "incomplete"
        state = kept(self._prepared.request)
        await self._end(
            status,
            completed_at=unix_time() if status == "completed" else None,
            incomplete_details=None if status == "completed" else {"reason": "max_output_tokens"},
            **({} if state is None else {"state": state}),
        )

    async def _run(self) -> None:
        """Generate all tokens, and renew the lease meanwhile."""
        settings = self._catalog.settings
        known = tuple(self._saying.ids)
        # Clients may have received more tokens than the row in the store has. Only the same arithmetic samples these tokens again.
        numerics = self.row.numerics if self.row is not None and known else ""
        asked = replace(self._prepared.request, known=known, numerics=numerics)
        runs = await Runs.submit(self._prepared.model, [asked], self.call, n=1, prompt_field="input", stream=False)
        self._numerics = runs.runs[0].numerics
        tell_exactness(self.call, self._prepared.begin, runs)
        interval_s = settings.stream_interval_s if self._streamed or self.unattended else _UNHURRIED_S
        try:
            while not runs.done:
                taken = await runs.take(LEASE_S / 3 if self.row is not None else None, interval_s)
                if time.monotonic() - self._written > LEASE_S:
                    await self._progress_if_due()  # after a pause, check that this process still owns the response before showing tokens
                for _, delta in taken:
                    self._saying.add(delta)
                self._cached = runs.cached_tokens
                if taken:
                    self.answer.status = "in_progress"
                    self._tell()
                if not runs.done:
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

    # The end of the response -------------------------------------------------------------------------------------------------------------

    async def _end(self, status: str, **fields: Any) -> None:
        """Write the ended response to the store, then set its last status for readers in this process."""
        request = self._prepared.request
        before = 0 if request.start is None else request.start.position
        usage = usage_of(before + len(request.prompt), max(before, self._cached), self._saying.count)
        warnings = window_warnings(self._prepared.model, sequence_tokens(request, self._saying.count))
        answer = Answer({**self.answer.head, "usage": usage, **fields, **warnings}, self._saying, self.answer.call)
        answer.status = status
        try:
            if self.row is not None:
                await self._write(replace(self._now(answer), ids=[], work=None, due=None))
        finally:
            if self.row is None or self.row.ended:  # the row has ended too if this task was cancelled during the write
                self.answer.head, self.answer.status = answer.head, status

    async def _fail(self, error: Exception) -> None:
        """End the response with an error. If the client has not received the response's id yet, delete the row, since the answer to the
        client's request is the error."""
        if isinstance(error, ServiceError):
            self.error = error
        else:
            log.error("unexpected error", extra=self.call.identity, exc_info=error)
            self.error = ServiceError(INTERNAL_ERROR)
        told = error_of(self.error)
        try:
            if self.row is not None and self._unheard:
                await self._erase()
            else:
                await self._end("failed", error=told)
        except _Lost:
            await self._forget()
        except ServiceError as failure:  # a later sweep marks the row as failed
            log.warning("a failed response could not be stored", extra={**self.call.identity, "error": failure.code})
        self.answer.head, self.answer.status = {**self.answer.head, "error": told}, "failed"

    async def _release(self, retry_s: float, *, to_blame: bool = False) -> None:
        """Give up the ownership of the response. Another process, or this process later, continues it after the tokens generated so far.

        The response can be continued after `retry_s` seconds. `to_blame`: the response may have caused the failure, so this process counts
        as one of the owners that were lost with it.
        """
        assert self.row is not None
        self.lost = True
        row = self._now(self.answer)
        await self._write(replace(row, owners=row.owners - (not to_blame), due=time.time() + retry_s))

    async def _forget(self) -> None:
        """Note that this process does not own the response any more. If the response was deleted, delete its state too."""
        self.lost = True
        assert self.row is not None
        row = self.row

        def clear(engine: StateEngine) -> None:
            try:
                find(engine, row.tenant, row.id)
            except ResponseNotFound:
                drop_state(engine, row)

        with suppress(ServiceError):
            await store_of(self._catalog).call(clear)

    # The row in the store ----------------------------------------------------------------------------------------------------------------

    async def _progress_if_due(self) -> None:
        """Renew the lease of a stored response in time. While no client waits, also write new tokens, since they would be lost."""
        if self.row is None:
            return
        now = time.monotonic()
        grown = self.unattended and self._saying.count > self._written_count
        if (grown and now >= self._next_write) or now - self._written >= LEASE_S / 3:
            try:
                await self._progress()
            except StoreFailed:  # the generation goes on until another process takes over, after the lease ends
                self._next_write = now + _PROGRESS_S

    async def _progress(self) -> None:
        """Write the tokens generated so far, and renew the lease."""
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
        """Write the row, and return its size in bytes. Raises _Lost if another process has written or deleted the row meanwhile."""
        document = await asyncio.to_thread(row.document) if len(row.ends) > _LARGE_TOKENS else row.document()
        settings, began = self._catalog.settings, time.monotonic()
        quota, ttl_s = quota_of(settings), settings.state_ttl_s
        writing = asyncio.ensure_future(store_of(self._catalog).call(lambda engine: write(engine, row, document, quota, ttl_s)))
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

        def erase(engine: StateEngine) -> None:
            with suppress(ServiceError):
                engine.erase(row.tenant, "response", row.id, row.version)
                drop_state(engine, row)

        await store_of(self._catalog).call(erase)


class _Lost(Exception):
    """Raised if another process has written or deleted the row."""


async def _whatever_happens(writing: "asyncio.Future[int]") -> int:
    """Return the result of a write. If this task is cancelled, wait for the write's end first, so that the row's version is known."""
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def failed(row: Row, error: ServiceError) -> Row:
    """Return the row with status `failed` and this error."""
    return ended(row, "failed", error=error_of(error))
