"""The process of a replica that accepts requests. It contains models, application and HTTP server. Requests bypass Ray's request handler.

For every request Ray's handler creates two tasks, a dozen objects and three random ids, to count and trace the request. This work is not
needed here, because the edge counts, limits, times and drains requests itself. On one machine this process serves at a socket that it gets
from the command (`lifeline.py`). On a cluster Ray owns the socket and the server, and a middleware (Ray's documented hook) answers before
Ray's handler. Ray still starts, checks, replaces and stops the replica.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service.deployment.haproxy import KEEP_ALIVE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from service.app import Application
    from service.catalog import Catalog
    from service.settings import Settings

_RAYS_OWN = ("/-/healthz", "/-/routes")  # paths of HAProxy's health checks; Ray answers them

catalog: "Catalog | None" = None
_application: "Application | None" = None


def start(frozen: str, log_file: str | None, make_catalog: "Callable[[Settings], Catalog]") -> "Application":
    """Create this process's application from `frozen`, the settings as JSON. Call it once per replica. The models are loaded when the
    application's lifespan begins.

    `log_file` is in the run directory of a service on one machine. It is None on a cluster, where Ray runs the HTTP server.
    """
    global catalog, _application  # noqa: PLW0603  # Ray and uvicorn find both by the name of this module
    # Imported late: Ray's proxy imports this module for `middlewares`, where the modules below would only waste memory.
    from service.app import build_app
    from service.deployment.lifeline import keep_files_in
    from service.http.connections import install
    from service.settings import Settings
    from service.telemetry.logs import to_file

    settings = Settings.model_validate_json(frozen)
    to_file(Path(log_file) if log_file else None, settings.log_level)
    install(stall_s=settings.stream_stall_s, behind_proxy=not settings.lean)
    catalog = make_catalog(settings)
    _application = build_app(catalog)
    if log_file:
        keep_files_in(Path(log_file).parent)
        several = settings.profile == "split" and settings.most("gateways") > 1
        _serve_in_lifespan(_application, Path(log_file).parent, catalog, once_warm=several)
    return _application


def _serve_in_lifespan(application: "Application", run: Path, catalog: "Catalog", *, once_warm: bool) -> None:
    """Make `application` accept connections during its whole lifespan, which begins before its models are loaded.

    once_warm: only from when they are loaded, because other gateways answer until then, and HAProxy cannot send them what this one refuses
    if a body is larger than HAProxy's buffer. A connection that comes earlier waits.
    """
    inner = application.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with inner(app) as state, _serving(application, run, catalog, once_warm=once_warm):
            yield state

    application.router.lifespan_context = lifespan


@asynccontextmanager
async def _serving(application: "Application", run: Path, catalog: "Catalog", *, once_warm: bool) -> AsyncIterator[None]:
    import uvicorn

    from service.deployment.lifeline import Lifeline

    line = Lifeline(run, "ingress", os.getpid())
    loop = asyncio.get_running_loop()
    line.beat(loop)
    listener = line.listener()
    line.await_drain(loop, catalog.drain)
    config = uvicorn.Config(
        application,
        lifespan="off",
        access_log=False,
        log_level=None,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        proxy_headers=False,  # HAProxy has a header of its own; without HAProxy, a client could give itself another address
        server_header=False,
    )
    server = uvicorn.Server(config)

    async def serve() -> None:
        if once_warm:
            await catalog.warm.wait()
        await server.serve(sockets=[listener])

    serving = asyncio.create_task(serve())
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        if not server.started:
            serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


class PastRay:
    """ASGI middleware that calls this process's application if there is one. Otherwise, as in Ray's proxies, it calls `ray_app`."""

    def __init__(self, ray_app: ASGIApp) -> None:
        self._ray_app = ray_app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _application is None or scope["path"] in _RAYS_OWN:
            await self._ray_app(scope, receive, send)
        else:
            await _application(scope, receive, send)


def middlewares() -> list[Any]:
    """Return the middlewares of Ray's HTTP server. RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function."""
    return [Middleware(PastRay)]
