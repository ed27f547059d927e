"""Does what every request needs besides its route: id, API key, size limit and deadline before it; metrics, log and trace after it."""

import asyncio
import logging
import re
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from service.call import CONNECTION_HEADER, JSON_LENGTH_HEADER, Call, read_headers, waited_s
from service.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    NotReady,
    ServiceError,
)
from service.http.content_encoding import CompressingSend, inflate
from service.http.gate import CLIENT_GONE, OPEN, Gate
from service.http.interrupts import WHOLE, ClientGone, EndedAt, Leaving
from service.http.keys import key_in
from service.http.routing import CALL, CATALOG, JsonRoute, address
from service.overload.uploads import Uploads

if TYPE_CHECKING:
    from service.telemetry.tracing import RequestSpan

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger("attnserve.http")
USAGE_PATH = "/v1/usage"
_OWNED = re.compile(r"/v1/(?:states|responses|conversations|stream)/")  # paths that continue with the id or name of a tenant's data
_WITH_BODY = ("POST", "PUT", "PATCH")
_MOST_DIGITS = 18  # limit on the digits of a content-length: `int` raises another error for thousands of digits
_LARGE_BODY, _PIECE = 262_144, 65_536  # an answer above the first size, in bytes, is sent in pieces of the second
_TURN_BYTES = 32_768  # each iteration of the event loop parses at most one body that is larger than this


class Edge:
    """The outermost ASGI application. It calls the routes in `exact` directly, and forwards all other requests to `app`."""

    def __init__(self, app: Any, exact: Mapping[tuple[str, str], JsonRoute], gate: Gate) -> None:
        self.app = app
        self.exact = exact
        self.gate = gate
        self.catalog = gate.catalog
        self._uploads = Uploads()
        self._reading = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # If no proxy forwards the request, header values may end in spaces.
        headers = {name.decode("latin-1"): value.decode("latin-1").rstrip() for name, value in scope["headers"]}
        call = self.gate.call(headers.get("x-request-id", ""))
        span = None
        if (tracer := self.catalog.tracer) is not None and not scope["path"].startswith(OPEN):  # probes are not traced
            span = tracer.request(scope["method"], _shown_path(scope), headers, call.started)
            span.mark(call)
        answer = _TrackedSend(CompressingSend(send, headers.get("accept-encoding", "")), call, self.gate, span)
        self.catalog.active += 1
        try:
            # Read the URL first: this may change the path, and the path's dialect determines the format of errors about headers.
            named, by_path = address(scope) if scope["query_string"] or scope["path"].startswith("/models/") else (None, False)
            read_headers(call, headers, self.catalog.settings.request_timeout_s)
            if named is not None:
                call.wanted, call.by_path = named, by_path
            await self._admit(scope, headers, call)
            if scope["method"] in _WITH_BODY:
                self.gate.read_delay.check(call.started, waited_s(headers))
            body = await self._content(scope, headers, receive, call) if scope["method"] in _WITH_BODY else b""
            call.content = hash(body)
            if len(body) > _TURN_BYTES:
                async with self._reading:  # one body per iteration of the event loop, so that several bodies together do not block it
                    await asyncio.sleep(0)
            ending = EndedAt(call.deadline, partial(DeadlineExceeded, "the request's deadline passed before its answer began"))
            call.pass_on_deadline = ending.disarm
            with ending, Leaving(receive):
                if (route := self.exact.get((scope["method"], scope["path"]))) is not None and route.answer is not None:
                    scope["route"] = route
                    response = await route.answer(body, call, self.catalog)
                    await response(scope, receive, answer)
                else:
                    scope[CALL], scope[CATALOG] = call, self.catalog
                    await self.app(scope, _replay(body, receive), answer)
        except ServiceError as error:
            if delay_s := self.gate.delay_s(error):
                await asyncio.sleep(delay_s)
            await self._refuse(scope, answer, error)
        except ClientGone:
            answer.status = CLIENT_GONE
        except asyncio.CancelledError:
            answer.status = CLIENT_GONE
            raise
        except Exception as error:
            await self._refuse(scope, answer, self.gate.unexpected(call, _shown_path(scope), error))
        finally:
            matched = getattr(scope.get("route"), "path", "unmatched")
            self.gate.end(call, answer.status or 500, scope["method"], _shown_path(scope), matched, span)

    async def _admit(self, scope: Scope, headers: dict[str, str], call: Call) -> None:
        """Set the client of `call`. Raises NotReady during shutdown, Unauthorized without a key, RateLimited if
        the tenant is over one of its limits."""
        if scope["path"].startswith(OPEN) or scope["method"] == "OPTIONS":
            return
        if self.catalog.draining:
            raise NotReady("the service is shutting down: send the request to another replica")
        key = key_in(headers)
        needed = bool(key) or scope["path"] != "/" or scope["method"] != "GET"  # the page at / for browsers (`pages.root`) needs no key
        tenant = self.gate.identify(call, scope.get("client"), headers.get(CONNECTION_HEADER, ""), key, needed=needed)
        if tenant is not None and scope["path"] != USAGE_PATH:  # a tenant over its limits may still read its usage
            await tenant.refill()
            tenant.admit()

    async def _content(self, scope: Scope, headers: dict[str, str], receive: Receive, call: Call) -> bytes:
        """Read and return the whole body, decompressed and without a byte order mark, which parsers of JSON refuse."""
        body = await self._body(scope, headers, receive, call)
        if headers.get("content-encoding", "identity") != "identity":
            body = await self._inflated(headers["content-encoding"], body, call)
        return body[len(BOM_UTF8) :] if body.startswith(BOM_UTF8) and JSON_LENGTH_HEADER not in headers else body

    async def _body(self, scope: Scope, headers: dict[str, str], receive: Receive, call: Call) -> bytes:
        """Read and return the whole body, within the limits on bytes and time."""
        limit = self.catalog.settings.max_body_bytes
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > _MOST_DIGITS or int(length) > limit):
            raise _too_large(f"{length} bytes", limit)
        if scope.get(WHOLE):  # then `receive` does not wait
            return self._taken(await receive(), call)
        chunks: list[bytes] = []
        late = partial(DeadlineExceeded, "the request's deadline passed before its body was there")
        with EndedAt(call.deadline, late):
            async with self._uploads.begin(self.catalog.settings) as upload:
                while True:
                    message = await receive()
                    chunks.append(self._taken(message, call))
                    if not message.get("more_body"):
                        break
                    upload.came(len(chunks[-1]))
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _taken(self, message: Message, call: Call) -> bytes:
        """Return the part of the body in `message`, and reserve memory for it."""
        chunk: bytes = message.get("body", b"")
        size, limit = len(chunk), self.catalog.settings.max_body_bytes
        if call.body_bytes + size > limit:
            raise _too_large(f"more than {limit} bytes", limit)
        self.catalog.body_shares.take(call.host, size, call.body_bytes)
        call.body_bytes += size
        if message["type"] == "http.disconnect":
            raise ClientGone
        return chunk

    async def _inflated(self, coding: str, body: bytes, call: Call) -> bytes:
        """Return the decompressed body. The limits of an uncompressed body apply to it."""
        limit, pieces, size = self.catalog.settings.max_body_bytes, [], 0
        with EndedAt(call.deadline, partial(DeadlineExceeded, "the request's deadline passed before its body was inflated")):
            async for piece in inflate(coding, body):
                size += len(piece)
                if size > limit:
                    raise _too_large(f"more than {limit} bytes when it is inflated", limit)
                self.catalog.body_shares.take(call.host, len(piece), call.body_bytes)
                call.body_bytes += len(piece)
                pieces.append(piece)
        return b"".join(pieces)

    async def _refuse(self, scope: Scope, answer: "_TrackedSend", error: ServiceError) -> None:
        """Send the error in the format of the path's dialect, unless the answer has already begun."""
        if answer.status is None:
            status, body, headers = self.gate.refusal(scope["path"], error)
            raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
            await answer({"type": "http.response.start", "status": status, "headers": raw})
            await answer({"type": "http.response.body", "body": body})


class _TrackedSend:
    """An ASGI `send` that adds headers (request id, trace id, the tenant's limits) to the answer, and records the answer's status."""

    __slots__ = ("_call", "_gate", "_send", "_span", "status")

    def __init__(self, send: Send, call: Call, gate: Gate, span: "RequestSpan | None") -> None:
        self.status: int | None = None
        self._send, self._call, self._gate, self._span = send, call, gate, span

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._call.pass_on_deadline()
            message["headers"] = [*message.get("headers", ()), *self._gate.headers(self._call)]
            if self._span is not None:
                message["headers"].append((b"traceresponse", self._span.traceparent.encode()))
            if self.status == 503 and all(name != b"retry-after" for name, _ in message["headers"]):  # of a probe; errors have their own
                message["headers"].append((b"retry-after", b"1"))
        body = message.get("body", b"")
        if len(body) <= _LARGE_BODY:
            await self._send(message)
            return
        for at in range(0, len(body), _PIECE):  # the server would buffer a body sent in one call until the client has read all of it
            part = {"type": "http.response.body", "body": body[at : at + _PIECE]}
            await self._send({**part, "more_body": at + _PIECE < len(body) or bool(message.get("more_body"))})
            await asyncio.sleep(0)


def _shown_path(scope: Scope) -> str:
    """Return the path for logs and traces. If it contains ids or names of a tenant's data, return the template of the path instead."""
    path: str = scope["path"]
    owned = _OWNED.match(path)
    return path if owned is None else getattr(scope.get("route"), "path", f"{owned[0]}...")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns `body`, for an application that reads the request again."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def _too_large(size: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size} and the limit is {limit} (max_body_bytes): send less at once, or have the limit raised")
