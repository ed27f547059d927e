"""What stands before and after the answer of every request, with and without ASGI: its id, client and API key; its error, metrics and log.

`edge.py` passes ASGI requests through the gate, and `direct.py` plain requests.
"""

import logging
import random
import re
import time
from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response

from service.call import Call
from service.catalog import Catalog
from service.errors import BodyTooSlow, NotReady, Overloaded, QueueTooLong, ServiceError, StoreFailed, Unauthorized, UnsupportedEncoding
from service.http.content_encoding import ACCEPTED
from service.http.dialect import Dialect, dialect_of
from service.http.keys import Keys
from service.http.tenants import Tenant
from service.overload.refusals import ReadDelay, RefusalDelay
from service.runtime.lanes import Lane
from service.runtime.memory import LARGE_BYTES, LARGE_TOKENS

if TYPE_CHECKING:
    from service.telemetry.tracing import RequestSpan

log = logging.getLogger("attnserve.http")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Paths that begin with one of these need no key. They are probes, and pages for browsers with nothing specific to this installation.
OPEN = ("/health", "/metrics", "/ping", "/v2/health", "/docs", "/redoc", "/openapi.json", "/console/")
INTERNAL_ERROR = "internal error; the log has it under this request's id"
CLIENT_GONE = 499
_LEAST_DELAY_S = 0.05  # a refusal whose delay would be shorter is sent at once


class Gate:
    """The gate of one application."""

    def __init__(self, catalog: Catalog, keys: Keys, dialects: tuple[Dialect, ...]) -> None:
        self.catalog = catalog
        self.keys = keys
        self.read_delay = ReadDelay(catalog.settings.max_wait_s)
        self._dialects = dialects
        self._refusal_delay = RefusalDelay()

    def call(self, sent_id: str) -> Call:
        """Return the call of a new request. Its id is the one that the client sent, or a random one if that is not safe to log."""
        return Call(sent_id if _REQUEST_ID.fullmatch(sent_id) else f"{random.getrandbits(64):016x}", time.monotonic())

    def identify(self, call: Call, client: tuple[str, int] | None, named: str, key: str, *, needed: bool = True) -> Tenant | None:
        """Set the client of `call`, and return the tenant of its API key, or None if no key is `needed`. Raises Unauthorized.

        `client` is the other end of the connection, and `named` the `address:port` in the proxy's header. With the setting `lean` there is
        no proxy, so `named` is ignored, because a client may forge it.
        """
        if not named or self.catalog.settings.lean:
            address, port = client or ("", 0)
            call.client, call.host = f"{address}:{port}", address
        else:
            call.client, call.host = named, named.rpartition(":")[0]
        return self.keys.identify(key, call) if needed and self.keys.needed else None

    def delay_s(self, error: ServiceError) -> float:
        """Return for how many seconds to delay the answer for an error, or 0. Call it once for each error."""
        delay_s = self._refusal_delay.delay_s(time.monotonic()) if isinstance(error, QueueTooLong) else 0.0
        return delay_s if delay_s > _LEAST_DELAY_S else 0.0

    def refusal(self, path: str, error: ServiceError) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers of the answer for an error, in the format of the path's dialect."""
        return refusal(path, error, self._dialects)

    def unexpected(self, call: Call, path: str, error: Exception) -> ServiceError:
        """Log an error that no code expects, and return the one to answer with."""
        log.error("unexpected error", exc_info=error, extra={**call.identity, "path": path})
        return ServiceError(INTERNAL_ERROR)

    def headers(self, call: Call) -> list[tuple[bytes, bytes]]:
        """Return the headers of every answer, and charge the tenant: a stream's tokens are charged at its end, all others are known."""
        headers = [(b"x-request-id", call.request_id.encode("latin-1"))]
        if call.tenant is not None:
            call.tenant.charge(call)
            headers += call.tenant.headers()
        return headers

    def end(self, call: Call, status: int, method: str, path: str, route: str, span: "RequestSpan | None" = None) -> None:
        """Release what a request has reserved, and count it. Every request ends here. `path` is as logs may show it."""
        self.catalog.active -= 1
        if self.catalog.body_shares.used + self.catalog.answer_shares.used > LARGE_BYTES or call.tokens > LARGE_TOKENS:
            self.catalog.release.request()
        self.catalog.body_shares.give(call.host, call.body_bytes)
        self.catalog.answer_shares.give(call.host, call.answer_bytes)
        if call.tenant is not None:
            call.tenant.settle(call, status)
        elapsed_s = time.monotonic() - call.started
        if status != 503 or not path.startswith(OPEN):  # a probe that is told "not ready" is answered, not refused
            self.catalog.metrics.request(route, call.model, status, elapsed_s, bulk=call.lane == Lane.BULK)
        if span is not None:
            span.end(route, status, call)
        if self.catalog.settings.access_log or (status >= 500 and not path.startswith(OPEN)):
            log.log(
                logging.INFO if status < 500 else logging.WARNING,
                "request",
                extra={
                    **call.identity,
                    "method": method,
                    "path": path,
                    "status": status,
                    "duration_ms": round(elapsed_s * 1000, 2),
                    "model": call.model,
                    "tokens": call.tokens,
                    **({} if call.tenant is None else {"tenant": call.tenant.name, "key": call.key}),
                },
            )


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
