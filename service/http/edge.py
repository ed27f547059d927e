"""Does what every request needs besides its route: id, API key, size limit and deadline before it; metrics, log and trace after it."""

import asyncio
import logging
import random
import re
import time
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from service.call import CONNECTION_HEADER, JSON_LENGTH_HEADER, Call, read_headers, waited_s
from service.catalog import Catalog
from service.errors import (
    BodyTooLarge,
    BodyTooSlow,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    QueueTooLong,
    ServiceError,
    StoreFailed,
    Unauthorized,
    UnsupportedEncoding,
)
from service.http.content_encoding import ACCEPTED, CompressingSend, inflate
from service.http.dialect import Dialect, dialect_of
from service.http.interrupts import WHOLE, ClientGone, EndedAt, Leaving
from service.http.keys import Keys, key_in
from service.http.routing import CALL, CATALOG, JsonRoute, address
from service.overload.refusals import ReadDelay, RefusalDelay
from service.overload.uploads import Uploads
from service.runtime.lanes import Lane
from service.runtime.memory import LARGE_BYTES, LARGE_TOKENS

if TYPE_CHECKING:
    from service.telemetry.tracing import RequestSpan

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger("attnserve.http")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Paths that begin with one of these need no key. They are probes, and pages for browsers with nothing specific to this installation.
OPEN = ("/health", "/metrics", "/ping", "/v2/health", "/docs", "/redoc", "/openapi.json", "/console/")
USAGE_PATH = "/v1/usage"
_OWNED = re.compile(r"/v1/(?:states|responses|conversations|stream)/")  # paths that continue with the id or name of a tenant's data
INTERNAL_ERROR = "internal error; the log has it under this request's id"
CLIENT_GONE = 499
_WITH_BODY = ("POST", "PUT", "PATCH")
_MOST_DIGITS = 18  # limit on the digits of a content-length: `int` raises another error for thousands of digits
_LARGE_BODY, _PIECE = 262_144, 65_536  # an answer above the first size, in bytes, is sent in pieces of the second
_TURN_BYTES = 32_768  # each iteration of the event loop parses at most one body that is larger than this
_LEAST_DELAY_S = 0.05  # a refusal whose delay would be shorter is sent at once


class Edge:
    """The outermost ASGI application. It calls the routes in `exact` directly, and forwards all other requests to `app`."""

    def __init__(
        self, app: Any, exact: Mapping[tuple[str, str], JsonRoute], *, catalog: Catalog, keys: Keys, dialects: tuple[Dialect, ...]
    ) -> None:
        self.app = app
        self.exact = exact
        self.catalog = catalog
        self.keys = keys
        self.dialects = dialects
        self._uploads = Uploads()
        self._refusal_delay = RefusalDelay()
        self._reading = asyncio.Lock()
        self.read_delay = ReadDelay(catalog.settings.max_wait_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # If no proxy forwards the request, header values may end in spaces.
        headers = {name.decode("latin-1"): value.decode("latin-1").rstrip() for name, value in scope["headers"]}
        call = Call(request_id(headers.get("x-request-id", "")), time.monotonic())
        span = None
        if (tracer := self.catalog.tracer) is not None and not scope["path"].startswith(OPEN):  # probes are not traced
            span = tracer.request(scope["method"], _shown_path(scope), headers, call.started)
            span.mark(call)
        answer = _TrackedSend(CompressingSend(send, headers.get("accept-encoding", "")), call, span)
        self.catalog.active += 1
        try:
            # Read the URL first: this may change the path, and the path's dialect determines the format of errors about headers.
            named, by_path = address(scope) if scope["query_string"] or scope["path"].startswith("/models/") else (None, False)
            read_headers(call, headers, self.catalog.settings.request_timeout_s)
            if named is not None:
                call.wanted, call.by_path = named, by_path
            await self._admit(scope, headers, call)
            if scope["method"] in _WITH_BODY:
                self.read_delay.check(call.started, waited_s(headers))
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
            if delay_s := self.refusal_delay_s(error):
                await asyncio.sleep(delay_s)
            await self._refuse(scope, answer, error)
        except ClientGone:
            answer.status = CLIENT_GONE
        except asyncio.CancelledError:
            answer.status = CLIENT_GONE
            raise
        except Exception:
            log.exception("unexpected error", extra={**call.identity, "path": _shown_path(scope)})
            await self._refuse(scope, answer, ServiceError(INTERNAL_ERROR))
        finally:
            self.end(scope, call, answer.status or 500, span)

    async def _admit(self, scope: Scope, headers: dict[str, str], call: Call) -> None:
        """Set the client of `call`. Raises NotReady during shutdown, Unauthorized without a key, RateLimited if
        the tenant is over one of its limits."""
        if scope["path"].startswith(OPEN) or scope["method"] == "OPTIONS":
            return
        if self.catalog.draining:
            raise NotReady("the service is shutting down: send the request to another replica")
        call.client, call.host = self.connection(scope.get("client"), headers.get(CONNECTION_HEADER, ""))
        # The page at / for browsers (`pages.root`) needs no key.
        if self.keys.needed and ((key := key_in(headers)) or scope["path"] != "/" or scope["method"] != "GET"):
            tenant = self.keys.identify(key, call)
            if scope["path"] != USAGE_PATH:  # a tenant over its limits may still read its usage
                if tenant.must_ask():
                    await tenant.refill()
                tenant.admit()

    def connection(self, client: tuple[str, int] | None, named: str) -> tuple[str, str]:
        """Return the client's `address:port`, and its address alone. `client` is the other end of the connection, and `named` the
        `address:port` in the proxy's header. With the setting `lean` there is no proxy, so `named` is ignored, because a client may forge
        it.
        """
        if not named or self.catalog.settings.lean:
            address, port = client or ("", 0)
            return f"{address}:{port}", address
        return named, named.rpartition(":")[0]

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
        with EndedAt(call.deadline, late), self._uploads.begin(self.catalog.settings) as upload:
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
            status, body, headers = refusal(scope["path"], error, self.dialects)
            raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
            await answer({"type": "http.response.start", "status": status, "headers": raw})
            await answer({"type": "http.response.body", "body": body})

    def refusal_delay_s(self, error: ServiceError) -> float:
        """Return for how many seconds to delay the answer for an error, or 0. Call it once for each error."""
        delay_s = self._refusal_delay.delay_s(time.monotonic()) if isinstance(error, QueueTooLong) else 0.0
        return delay_s if delay_s > _LEAST_DELAY_S else 0.0

    def end(self, scope: Scope, call: Call, status: int, span: "RequestSpan | None" = None) -> None:
        """Release what a request has reserved, and count it. Every request ends here."""
        self.catalog.active -= 1
        if self.catalog.body_shares.used + self.catalog.answer_shares.used > LARGE_BYTES or call.tokens > LARGE_TOKENS:
            self.catalog.release.request()
        self.catalog.body_shares.give(call.host, call.body_bytes)
        self.catalog.answer_shares.give(call.host, call.answer_bytes)
        if call.tenant is not None:
            call.tenant.settle(call, status)
        elapsed_s = time.monotonic() - call.started
        route = getattr(scope.get("route"), "path", "unmatched")
        if status != 503 or not scope["path"].startswith(OPEN):  # a probe that is told "not ready" is answered, not refused
            self.catalog.metrics.request(route, call.model, status, elapsed_s, bulk=call.bulk or call.lane == Lane.BULK)
        if span is not None:
            span.end(route, status, call)
        if self.catalog.settings.access_log or (status >= 500 and not scope["path"].startswith(OPEN)):
            log.log(
                logging.INFO if status < 500 else logging.WARNING,
                "request",
                extra={
                    **call.identity,
                    "method": scope["method"],
                    "path": _shown_path(scope),
                    "status": status,
                    "duration_ms": round(elapsed_s * 1000, 2),
                    "model": call.model,
                    "tokens": call.tokens,
                    **({} if call.tenant is None else {"tenant": call.tenant.name, "key": call.key}),
                },
            )


class _TrackedSend:
    """An ASGI `send` that adds headers (request id, trace id, the tenant's limits) to the answer, and records the answer's status."""

    __slots__ = ("_call", "_ids", "_send", "status")

    def __init__(self, send: Send, call: Call, span: "RequestSpan | None") -> None:
        self.status: int | None = None
        self._call = call
        self._send = send
        self._ids = [(b"x-request-id", call.request_id.encode("latin-1"))]
        if span is not None:
            self._ids.append((b"traceresponse", span.traceparent.encode()))

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._call.pass_on_deadline()
            message["headers"] = [*message.get("headers", ()), *self._ids]
            if self.status == 503 and all(name != b"retry-after" for name, _ in message["headers"]):  # of a probe; errors have their own
                message["headers"].append((b"retry-after", b"1"))
            if (tenant := self._call.tenant) is not None:
                tenant.charge(self._call)  # a whole answer's tokens are known by now; a stream's are charged at its end
                message["headers"] += tenant.headers()
        body = message.get("body", b"")
        if len(body) <= _LARGE_BODY:
            await self._send(message)
            return
        for at in range(0, len(body), _PIECE):  # the server would buffer a body sent in one call until the client has read all of it
            part = {"type": "http.response.body", "body": body[at : at + _PIECE]}
            await self._send({**part, "more_body": at + _PIECE < len(body) or bool(message.get("more_body"))})
            await asyncio.sleep(0)


def request_id(sent: str) -> str:
    """Return the id that the client sent, or a random one if there is none that is safe to log."""
    return sent if _REQUEST_ID.fullmatch(sent) else f"{random.getrandbits(64):016x}"


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


def refused(error: ServiceError, dialect: Dialect) -> Response:
    """Return a response with the error in the format of `dialect`, for a path that several dialects share, such as `/rerank`."""
    status, body, headers = refusal(dialect.prefixes[0], error, (dialect,))
    return Response(body, status, headers)


def refusal(path: str, error: ServiceError, dialects: tuple[Dialect, ...]) -> tuple[int, bytes, dict[str, str]]:
    """Return status, body and headers of the answer for an error, in the format of the path's dialect."""
    status, content = dialect_of(path, dialects).render(error)
    body = orjson.dumps(content)
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    if isinstance(error, Overloaded | NotReady | StoreFailed):
        headers["retry-after"] = str(max(1, int(error.retry_after_s + 0.999)))
        headers["retry-after-ms"] = str(max(1, int(error.retry_after_s * 1000 + 0.999)))
    if status in (409, 412):
        headers["x-should-retry"] = "false"  # without this header, openai's clients repeat a request after a 409
    if isinstance(error, BodyTooSlow):
        headers["connection"] = "close"  # the connection is closed, since the rest of the request's body may never arrive
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, UnsupportedEncoding):
        headers["accept-encoding"] = ACCEPTED
    return status, body, headers
