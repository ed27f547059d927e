"""Streams the answers to bulk requests as NDJSON (one JSON object per line). Each input has one line, which is sent as soon as its row is
computed, in any order. The last line has the totals.

A line has the index of its input. The HTTP status is sent before all rows are computed, so if the whole request fails later, the
last line is the error in the dialect's format. A client must check that the last line has `usage`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from fastapi import Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.call import NDJSON, Call
from service.encoding.model import Model
from service.encoding.request import EncodeAnswer, EncodeRequest
from service.errors import ServiceError

log = logging.getLogger("attnserve")


async def stream(
    model: Model,
    request: EncodeRequest,
    call: Call,
    entry: Callable[[int, Any], dict[str, Any]],
    render: Callable[[ServiceError], tuple[int, Any]],
) -> Response:
    """Start the request and stream its rows. An error before the first row is raised, so the response has the error's status.

    After the first row, an error of one input is sent as a line, even if the request did not ask for errors by item. `entry(index, row)`
    returns the content of a line, and `render` the status and the content for an error.
    """
    await call.begin_stream()
    call.item_errors = True
    rows: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()  # no limit needed: it has at most one entry per input
    work = asyncio.create_task(model.answer(request, call, lambda index, row: rows.put_nowait((index, row))))

    def ended(done: asyncio.Task[EncodeAnswer]) -> None:
        _ = done.cancelled() or done.exception()  # without this, asyncio logs that the error was never retrieved
        rows.put_nowait(None)

    work.add_done_callback(ended)
    try:
        first = await rows.get()
    except asyncio.CancelledError:  # the client disconnected before the first row
        work.cancel()
        raise
    if first is None and (error := work.exception()):
        raise error

    async def lines() -> AsyncIterator[bytes]:
        item = first
        while item is not None:
            yield _line(_entry(entry, *item, render))
            item = await rows.get()
        error = work.exception()
        if error is None:
            yield _line(totals(work.result()))
        elif isinstance(error, ServiceError):
            yield _line(render(error)[1])
        else:
            log.error("unexpected error", exc_info=error, extra=call.identity)
            yield _line(render(ServiceError("internal error; the log has it under this request's id"))[1])

    return _Lines(lines(), work, call)


class _Lines(StreamingResponse):
    """A response that sends the lines of an answer. When the response ends, even before the first line, it cancels the model's work."""

    def __init__(self, lines: AsyncIterator[bytes], work: "asyncio.Task[EncodeAnswer]", call: Call) -> None:
        super().__init__(lines, media_type=NDJSON, headers=call.headers)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.cancel()


def _entry(
    entry: Callable[[int, Any], dict[str, Any]], index: int, row: Any, render: Callable[[ServiceError], tuple[int, Any]]
) -> dict[str, Any]:
    try:
        return entry(index, row)
    except ServiceError as error:
        return {"index": index, **render(error)[1]}


def totals(answer: EncodeAnswer) -> dict[str, Any]:
    """Return the end of an answer: the number of tokens, the truncated inputs, and the embedding space."""
    return {
        "system_fingerprint": answer.space,
        "usage": {"prompt_tokens": answer.n_tokens, "total_tokens": answer.n_tokens},
        "truncated": answer.truncated,
    }


def _line(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
