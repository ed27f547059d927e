"""All dialects over one catalog, as an ASGI application, independent of Ray."""

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from service.catalog import Catalog
from service.dialects.routers import DIALECTS, ROUTERS
from service.errors import CANNOT_START, InvalidRequest, MethodNotAllowed, RouteNotFound, ServiceError
from service.http import openapi
from service.http.cors import Cors
from service.http.edge import INTERNAL_ERROR, Edge, refusal
from service.http.keys import Keys
from service.http.routing import METHOD, allowed, canonical, exact

log = logging.getLogger("attnserve")

_SHOWN = 200  # characters of a path in an error


class Application(FastAPI):
    """FastAPI behind our edge, which gets every request before FastAPI and its middleware."""

    edge: Any
    keys: Keys
    needs_key = False
    _lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope, send = canonical(scope, send)
        await self.edge(scope, receive, send)

    async def inner(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made on the first request. Takes tenths of a second: not for the event loop."""
        with self._lock:
            if self.openapi_schema is None:
                self.openapi_schema = openapi.refined(super().openapi(), needs_key=self.needs_key)
            return self.openapi_schema


def build_app(catalog: Catalog, *, on_failure: Callable[[], None] | None = None) -> Application:
    """The application over a catalog, which it loads in the background: it answers 503 until every bundle has passed its self-test.

    If a bundle fails, `catalog.failure` is the reason and `on_failure` is called.
    """

    keys = Keys(catalog.settings, catalog.metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = asyncio.create_task(_warm(catalog, on_failure)), asyncio.create_task(keys.watch())
        yield
        for task in tasks:
            task.cancel()
        await catalog.stop()

    app = Application(
        title="attnserve",
        version=version("attnserve"),
        lifespan=lifespan,
        redirect_slashes=False,  # they would lead to any host that the Host header names
        description=openapi.DESCRIPTION,
        docs_url=None,  # FastAPI's pages load scripts from other hosts; `service/dialects/pages.py` has our own
        redoc_url=None,
        openapi_url=None,
    )
    app.keys = keys
    app.needs_key = keys.needed
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _unexpected)
    app.edge = Edge(app.inner, exact(ROUTERS), catalog=catalog, keys=keys, dialects=DIALECTS)
    if catalog.settings.cors_origins:  # before the edge: a browser's preflight requests carry no key
        app.edge = Cors(app.edge, catalog.settings.cors_origins, DIALECTS)
    return app


async def _warm(catalog: Catalog, on_failure: Callable[[], None] | None) -> None:
    try:
        await catalog.connect()
        await asyncio.to_thread(catalog.load)
        catalog.start()
        # Loaded objects live as long as the process, so the garbage collector skips them. Requests make few cycles, so it runs rarely.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)
        log.info("ready", extra={"models": list(catalog.models)})
    except Exception as error:
        catalog.failure = f"{CANNOT_START}: {error}"
        log.exception("start failed")
        if on_failure:
            on_failure()
    finally:
        catalog.warm.set()


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    status, body, headers = refusal(request.scope["path"], error, DIALECTS)
    return Response(body, status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of the framework, in the form of the path's dialect."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"], request.scope.get(METHOD, request.method)
    shown = path if len(path) <= _SHOWN else f"{path[:_SHOWN]}.."
    if error.status_code not in (404, 405):
        return await _service_error(request, _RequestRefused(str(error.detail), error.status_code))
    methods = allowed(path, ROUTERS)
    if not methods:
        return await _service_error(request, RouteNotFound(f"there is no {shown}; GET /docs lists what there is"))
    told = ", ".join(methods)
    if method == "OPTIONS":
        return Response(status_code=204, headers={"allow": told})
    response = await _service_error(request, MethodNotAllowed(f"{shown} does not take {method[:_SHOWN]}, only {told}"))
    response.headers["allow"] = told
    return response


class _RequestRefused(ServiceError):
    """A refusal of the framework, with its status."""

    code = "invalid_request"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def _validation_error(request: Request, error: Exception) -> Response:
    """A parameter in a path or query that its route does not accept."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"][1:])) or "request"
    return await _service_error(request, InvalidRequest(f"`{field}`: {first['msg']}", param=field))


async def _unexpected(request: Request, _: Exception) -> Response:
    """The exception is raised again after this answer, and the edge logs it."""
    return await _service_error(request, ServiceError(INTERNAL_ERROR))
