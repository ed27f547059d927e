"""Generates one response in this process, and writes its progress and its end to the store."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from service.call import Call
from service.catalog import Catalog
from service.dialects.openai.responses.answer import Answer, Said, Saying, error_of, usage_of
from service.dialects.openai.responses.preparing import Prepared
from service.dialects.openai.responses.stored import ResponseLease, ResponseNotFound, Row, drop_state, find
from service.dialects.states.finding import store_of
from service.dialects.text.answer import sequence_tokens, unix_time, window_warnings
from service.dialects.text.request import kept, tell_exactness
from service.errors import DocumentMoved, NotReady, Overloaded, ServiceError, StateNotFound, StoreFailed
from service.generation.runs import Runs
from service.http.gate import INTERNAL_ERROR
from service.http.interrupts import Interruptible
from service.states.engine import StateEngine
from service.streams.lease import LEASE_S

log = logging.getLogger("attnserve")

_UNHURRIED_S = 0.25  # seconds for which new tokens are gathered if no client streams the response
_LONGEST_RETRY_S = 30.0

Why = Literal["cancelled", "released", "lost"]


class _Stopped(Exception):
    """Raised if the generation was stopped."""


class _Lost(Exception):
    """Raised if another process has taken the response over, ended or deleted it."""


class Live:
    """A response that this process generates, with its run in the engine and its lease. Use it on the event loop.

    `ended` is set when this process no longer generates the response. `lost` is set when the row in the store is newer than this object:
    another process owns the response, the response was deleted, or it waits for a new owner.
    """

    def __init__(
        self,
        catalog: Catalog,
        prepared: Prepared,
        answer: Answer,
        call: Call,
        *,
        lease: ResponseLease | None,
        streamed: bool,
        said: Said | None = None,
    ) -> None:
        """`lease`: of the stored response, None if it is not stored. `said`: the text that an earlier owner has generated, if any."""
        self.answer = answer
        self.ended = self.lost = False
        self.heard = False  # whether a client has read a part of the stream
        self.error: ServiceError | None = None
        self.lease = lease
        self.background: bool = answer.head["background"]
        self.unattended = self.background or said is not None  # whether no client waits for this process to answer a POST
        self.call = call
        self._catalog = catalog
        self._prepared = prepared
        self._streamed = streamed
        self._cached = 0
        self._numerics = "" if lease is None else lease.row.numerics
        self._why: Why | None = None  # why the generation was stopped; None if it was not stopped
        self._interrupt: Callable[[], None] | None = lambda: None  # stops the generation; None when it has ended
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._saying = Saying(prepared.model, prepared.request)
        if said is not None:
            self._saying.resume(said)
        answer.said = self._saying
        if lease is not None:
            lease.now, lease.on_loss = self._now, lambda: self.stop("lost")

    @property
    def continuable(self) -> bool:
        """Return whether another process can continue the response."""
        return self.lease is not None and self.lease.row.work is not None

    @property
    def _unheard(self) -> bool:
        """Return whether a client waits for the answer to its POST, and has no part of it yet."""
        return not (self.unattended or self.heard or (self._streamed and self._saying.count))

    def start(self) -> asyncio.Task[None]:
        if self.lease is not None:
            self.lease.begin()
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(lambda task: self._over())
        return self._task

    def stop(self, why: Why = "cancelled") -> None:
        """Stop the generation. A cancelled response has ended. A released response waits in the store for another owner, or is cancelled if
        it is not `continuable`."""
        if self._why is None and self._interrupt is not None:
            self._why = why
            self._interrupt()

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
            except _Stopped:
                if self._why == "lost":
                    raise _Lost from None
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
        if self.lease is not None:
            self.lease.leave()
        self._tell()
        if self.unattended and self.call.tenant is not None:
            self.call.tenant.settle(self.call, 200)

    async def _generate(self) -> None:
        try:
            with Interruptible(_Stopped) as self._interrupt:
                if self._why is not None:
                    raise _Stopped
                await self._run()
        finally:
            self._interrupt = None
        status = "completed" if self._saying.finish_reason == "stop" else "incomplete"
        state = kept(self._prepared.request)
        await self._end(
            status,
            completed_at=unix_time() if status == "completed" else None,
            incomplete_details=None if status == "completed" else {"reason": "max_output_tokens"},
            **({} if state is None else {"state": state}),
        )

    async def _run(self) -> None:
        """Generate all tokens. Raises _Lost before a token is shown that this process generated without a valid lease."""
        lease = self.lease
        known = tuple(self._saying.ids)
        # Clients may have received more tokens than the row in the store has. Only the same arithmetic samples these tokens again.
        asked = replace(self._prepared.request, known=known, numerics=self._numerics if known else "")
        runs = await Runs.submit(self._prepared.model, [asked], self.call, n=1, prompt_field="input", stream=False)
        self._numerics = runs.runs[0].numerics
        tell_exactness(self.call, self._prepared.begin, runs)
        interval_s = self._catalog.settings.stream_interval_s if self._streamed or self.unattended else _UNHURRIED_S
        try:
            while not runs.done:
                taken = await runs.take(None, interval_s)
                if lease is not None and not await lease.holds():
                    raise _Lost
                for _, delta in taken:
                    self._saying.add(delta)
                self._cached = runs.cached_tokens
                if taken:
                    self.answer.status = "in_progress"
                    self._tell()
                if lease is not None and self.unattended and not runs.done:  # no client has the tokens yet
                    lease.note(self._saying.count)
        finally:
            runs.close()

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
        await self._finish(answer, ids=[], work=None, due=None)
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
            if self.lease is not None and self._unheard:
                self.lease.abandon()
                await self.lease.written()
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
        assert self.lease is not None
        self.lost = True
        await self._finish(self.answer, owners=self.lease.row.owners - (not to_blame), due=time.time() + retry_s)

    async def _finish(self, answer: Answer, **fields: Any) -> None:
        """Write the row with these fields, if the response is stored, and give up its lease."""
        if self.lease is None:
            return
        try:
            await self.lease.finish(replace(self._now(answer), **fields))
        except (DocumentMoved, StateNotFound):
            raise _Lost from None

    async def _forget(self) -> None:
        """Note that this process does not own the response any more. If the response was deleted, delete its state too."""
        assert self.lease is not None
        self.lost, row = True, self.lease.row

        def clear(engine: StateEngine) -> None:
            try:
                find(engine, row.tenant, row.id)
            except ResponseNotFound:
                drop_state(engine, row)

        with suppress(ServiceError):
            await store_of(self._catalog).call(clear)

    def _now(self, answer: Answer | None = None) -> Row:
        """Return the row with the tokens generated so far, for `answer` in place of the present one."""
        assert self.lease is not None
        answer, said = answer or self.answer, self._saying
        raw = None if answer.call is None else said.text
        written: Any = {"ids": said.ids.copy(), "ends": said.ends.copy(), "raw": raw, "numerics": self._numerics}
        return replace(self.lease.row, response=answer.response(), **written)
