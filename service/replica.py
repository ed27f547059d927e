"""What lives in a replica's process: the models, the application over them, and the short way past Ray's own request handling.

Ray's handler makes two tasks, a dozen objects and three random ids of every request to count and trace it. None of that is used here: the
edge counts, bounds, times and drains requests itself. So Ray is given a middleware (its documented hook for them) that answers in its
place. What Ray still does in the request's path is own the socket and the HTTP server; it starts, checks, replaces and stops the replica.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from collections.abc import Callable

    from service.app import Application
    from service.catalog import Catalog
    from service.settings import Settings

_RAYS_OWN = ("/-/healthz", "/-/routes")  # what HAProxy asks to know whether the replica is there

catalog: "Catalog | None" = None
_application: "Application | None" = None


def start(frozen: str, log_file: str | None, make_catalog: "Callable[[Settings], Catalog]") -> "Application":
    """The application of this process. To be called once, in the replica; the models are loaded when its lifespan begins."""
    global catalog, _application
    # Not at the top: Ray's proxy imports this module for `middlewares`, and has no use for the rest in its memory.
    from service.app import build_app
    from service.connections import install
    from service.logs import to_file
    from service.settings import Settings

    settings = Settings.model_validate_json(frozen)
    to_file(Path(log_file) if log_file else None, settings.log_level)
    install(stall_s=settings.stream_stall_s, behind_proxy=not settings.lean)
    catalog = make_catalog(settings)
    _application = build_app(catalog)
    return _application


class PastRay:
    """ASGI middleware: this process's application where there is one, otherwise (in Ray's proxies) `ray_app`."""

    def __init__(self, ray_app: ASGIApp) -> None:
        self._ray_app = ray_app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _application is None or scope["path"] in _RAYS_OWN:
            await self._ray_app(scope, receive, send)
        else:
            await _application(scope, receive, send)


def middlewares() -> list[Any]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(PastRay)]
