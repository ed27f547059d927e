"""The ASGI application: the routes of all dialects (HTTP APIs) for the models of one catalog. It does not depend on Ray."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from service.catalog import Catalog
from service.dialects import development
from service.dialects.openai.responses.running import running_of
from service.dialects.routers import DIALECTS, ROUTERS
from service.errors import CANNOT_START, InvalidRequest, MethodNotAllowed, RouteNotFound, ServiceError
from service.http import openapi
from service.http.cors import Cors
from service.http.direct import Direct
from service.http.edge import Edge
from service.http.gate import INTERNAL_ERROR, Gate, refusal
from service.http.keys import Keys
from service.http.routing import METHOD, SHORT, allowed, canonical, exact
from service.http.shared_limits import SharedLimits
from service.runtime.garbage import keep_loaded
from service.telemetry.history import History

log = logging.getLogger("attnserve")

_SHOWN = 200  # an error message shows at most this many characters of a path


class Application(FastAPI):
    """A FastAPI application that passes every request to `Edge` first, before FastAPI and its middleware."""

    edge: Any
    direct: Direct  # handles plain requests; found by `service/http/connections.py`
    keys: Keys
    sharing: SharedLimits
    needs_key = development = False
    history: History
    _lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope, send = canonical(scope, send)
        await self.edge(scope, receive, send)

    async def inner(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document. The first call takes tenths of a second to build it, so do not call this on the event loop."""
        with self._lock:
            if self.openapi_schema is None:
                routes = [route for route in self.routes if self.development or route not in development.router.routes]
                document = get_openapi(title=self.title, version=self.version, description=self.description, routes=routes)
                self.openapi_schema = openapi.refined(document, needs_key=self.needs_key)
            return self.openapi_schema


def build_app(catalog: Catalog) -> Application:
    """Return the application. It loads the catalog in the background, and answers 503 until every bundle has passed its self-test. If a
    bundle fails, it sets `catalog.failure` to the reason.
    """
    sharing = SharedLimits()
    keys = Keys(catalog.settings, catalog.metrics, sharing=sharing)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = running_of(catalog)
        running.tenant_named = keys.tenant
        kept = [history.watch()] if catalog.settings.console else []
        tasks = [asyncio.create_task(work) for work in (_warm(catalog), keys.watch(), running.watch(), sharing.watch(catalog), *kept)]
        yield
        for task in tasks:
            task.cancel()
        await running.close()
        await sharing.close()
        await catalog.stop()

    app = Application(
        title="attnserve",
        version=version("attnserve"),
        lifespan=lifespan,
        redirect_slashes=False,  # off, because a redirect would go to the host in the request's Host header, which a client may forge
        description=openapi.DESCRIPTION,
        docs_url=None,  # FastAPI's pages load scripts from other hosts; ours are in `service/dialects/pages.py`
        redoc_url=None,
        openapi_url=None,
    )
    app.keys, app.sharing = keys, sharing
    app.needs_key, app.development = keys.needed, catalog.settings.development
    app.history = history = History(catalog.metrics)
    # Routes are added directly, because `include_router` would build each route again when the first request arrives.
    app.router.routes += [route for router in ROUTERS for route in router.routes]
    for kind in (ServiceError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refuse)
    gate = Gate(catalog, keys, DIALECTS)
    routes = exact(ROUTERS)
    app.edge = Edge(app.inner, routes, gate)
    app.direct = Direct(gate, {path: routes["POST", path] for path in ("/v1/embeddings", "/embeddings")})
    if catalog.settings.cors_origins:  # CORS runs before the edge, since preflight requests of browsers carry no API key
        app.edge = Cors(app.edge, catalog.settings.cors_origins, DIALECTS)
    return app


async def _warm(catalog: Catalog) -> None:
    try:
        await catalog.connect()
        await asyncio.to_thread(catalog.load)
        catalog.start()
        keep_loaded()
        catalog.release.request()  # the memory that only loading and the tests of the bundles needed
        log.info("ready", extra={"models": list(catalog.models)})
    except Exception as error:
        catalog.failure = f"{CANNOT_START}: {error}"
        log.exception("start failed")
    finally:
        catalog.warm.set()


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer any error in the format of the path's dialect. Starlette raises an unexpected error again, and the edge logs it."""
    path, method, more = request.scope["path"], request.scope.get(METHOD, request.method), {}
    refused = error if isinstance(error, ServiceError) else ServiceError(INTERNAL_ERROR)
    if isinstance(error, RequestValidationError):  # FastAPI raises it for an invalid parameter in the path or query
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"][1:])) or "request"
        given = "" if first["type"] == "missing" else f". Given: {SHORT.repr(first['input'])}"
        refused = InvalidRequest(f"`{field}`: {first['msg']}{given}", param=field)
    elif isinstance(error, HTTPException) and error.status_code not in (404, 405):
        refused = ServiceError(str(error.detail))
        refused.status, refused.code = error.status_code, "invalid_request"
    elif isinstance(error, HTTPException):
        shown = path if len(path) <= _SHOWN else f"{path[:_SHOWN]}.."
        if methods := ", ".join(allowed(path, ROUTERS)):
            more = {"allow": methods}
            if method == "OPTIONS":
                return Response(status_code=204, headers=more)
            refused = MethodNotAllowed(f"{shown} does not take {method[:_SHOWN]}, only {methods}")
        else:
            refused = RouteNotFound(f"there is no {shown}; GET /docs lists what there is")
    status, body, headers = refusal(path, refused, DIALECTS)
    return Response(body, status, {**headers, **more})
