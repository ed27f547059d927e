"""All dialects on one core, as an ASGI application. It knows nothing of Ray."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from service.catalog import Catalog
from service.dialects import Dialect, attention, chat, cohere, completions, health, images, jina, oip, openai, responses, tei, tokens
from service.edge import Edge, refusal
from service.errors import CANNOT_START, MethodNotAllowed, RouteNotFound, ServiceError
from service.routing import exact

log = logging.getLogger("attnserve")

# Matched from the top: what is called most stands first.
MODULES = (openai, chat, completions, responses, images, tei, cohere, jina, oip, tokens, attention)
DIALECTS: tuple[Dialect, ...] = tuple(module.DIALECT for module in (openai, tei, cohere, jina, oip))


class Application(FastAPI):
    """FastAPI with our edge around all of it, its own middleware included."""

    edge: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.edge(scope, receive, send)

    async def inner(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


def build_app(catalog: Catalog, *, on_failure: Callable[[], None] | None = None) -> Application:
    """The application around a catalog that it loads itself: the port answers at once, 503 until every bundle has passed its self-test.

    When one does not pass, `catalog.failure` says why and `on_failure` is called.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(_warm(catalog, on_failure))
        yield
        warming.cancel()
        await catalog.stop()

    app = Application(
        title="attnserve",
        version=version("attnserve"),
        lifespan=lifespan,
        redirect_slashes=False,  # to whatever the Host header says
        description="Embeddings and rerank scores over HTTP.",
    )
    routers = [module.router for module in (*MODULES, health)]
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.edge = Edge(app.inner, exact(routers), catalog=catalog, dialects=DIALECTS)
    if catalog.settings.cors_origins:  # outside of the edge: a browser asks for permission without a key
        app.edge = CORSMiddleware(app.edge, allow_origins=catalog.settings.cors_origins, allow_methods=["*"], allow_headers=["*"])
    return app


async def _warm(catalog: Catalog, on_failure: Callable[[], None] | None) -> None:
    try:
        await catalog.connect()
        await asyncio.to_thread(catalog.load)
        catalog.start()
        # What was loaded stays for good: the collector need not look at it again, nor, with few cycles made a request, look often.
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
    status, body, headers = refusal(request.url.path, error, DIALECTS)
    return Response(body, status, headers)


def _allowed(request: Request) -> str:
    """The methods of every route of ours at this path; the router's own `Allow` names those of one."""
    path = getattr(request.scope.get("route"), "path", None)
    routes = (route for module in MODULES for route in module.router.routes if isinstance(route, APIRoute) and route.path == path)
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of the framework itself, said in the dialect of the path."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 405:
        allowed = _allowed(request) or (error.headers or {}).get("Allow", "")
        said: ServiceError = MethodNotAllowed(f"{path} does not take {method}" + (f", only {allowed}" if allowed else ""))
        response = await _service_error(request, said)
        response.headers["allow"] = allowed
        return response
    return await _service_error(request, RouteNotFound(f"there is no {method} {path}; GET /docs lists what there is"))
