"""Handles cross-origin requests of browsers (CORS). Preflight requests need no API key. Scripts can read all headers."""

import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import OriginRefused
from service.http.dialect import Dialect
from service.http.gate import refusal


class Cors(CORSMiddleware):
    """Starlette's CORS middleware with two changes: a preflight's answer has a request id, and a refusal has the dialect's error format."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], dialects: tuple[Dialect, ...]) -> None:
        super().__init__(
            app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"], allow_private_network=True
        )
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" and scope["method"] == "OPTIONS" else {}
        if "origin" in headers and "access-control-request-method" in headers:
            await self._preflight(scope["path"], Headers(scope=scope))(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def _preflight(self, path: str, asked: Headers) -> Response:
        granted = self.preflight_response(asked)
        headers = {name: value for name, value in granted.headers.items() if name not in ("content-length", "content-type")}
        headers["x-request-id"] = secrets.token_hex(8)
        if granted.status_code == 200:
            return Response(status_code=204, headers=headers)
        origin, method = asked["origin"][:80], asked["access-control-request-method"][:80]
        error = OriginRefused(f"{method!r} from origin {origin!r} is not allowed: the setting cors_origins names the origins that are")
        status, body, more = refusal(path, error, self._dialects)
        return Response(body, status, {**headers, **more})
