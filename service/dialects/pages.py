"""Pages for browsers: `/` is the console, `/docs` and `/redoc` show the OpenAPI document, `/openapi.json` is the document.

All files come from this package. The pages load nothing from other origins, and their content security policy forbids it.
These pages need no API key, because a browser has none until its user enters one there, and because they contain no model names:
they are the same for every installation of a version. The console asks the routes that other clients use, with the key of its user.
"""

import asyncio
import gzip
import time
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from service.call import Call
from service.catalog import Catalog, Served
from service.dialects.tei.schemas import TeiError
from service.errors import NotReady, RouteNotFound
from service.http.routing import CallDep, CatalogDep, JsonRoute, json_response

_ASSETS = Path(__file__).parents[1] / "docs_assets"
_CONSOLE = Path(__file__).parents[1] / "console" / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "docs.js": "text/javascript",
    "redoc.standalone.js": "text/javascript",
}
_NOTHING_ELSE = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# Swagger UI and Redoc need inline styles and inline SVG images. Redoc's search needs a worker made from a blob.
_DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    f"connect-src 'self'; worker-src blob:; {_NOTHING_ELSE}"
)
_CONSOLE_POLICY = f"default-src 'self'; object-src 'none'; {_NOTHING_ELSE}"
_SAFE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class RootModel_(BaseModel):
    name: str
    kind: str


class RootRoute(BaseModel):
    method: str
    path: str
    summary: str


class Processes(BaseModel):
    """How the service is divided into processes, and the CPUs of the process that answers."""

    profile: str
    gateways: int = Field(description="0 in profile single, where one process does all.")
    encoders: int
    generators: int
    cpus: int
    runtime_threads: int
    tokenizer_threads: int


class Root(BaseModel):
    name: str
    version: str
    docs: str
    openapi: str
    development: bool = Field(description="Whether requests may kill processes, to see streams continue.")
    models: list[RootModel_] | None
    processes: Processes | None
    routes: list[RootRoute]


router = APIRouter(route_class=JsonRoute, tags=["Operation"])


# The first page ------------------------------------------------------------------------------------------------------------------------


@router.get("/", response_model=Root, responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}, 503: {"model": TeiError}})
async def root(request: Request, call: CallDep, catalog: CatalogDep) -> Response:
    """Return the version, models, processes and routes. Browsers (`Accept: text/html`) get the console, unless the setting `console`
    is off. The status is 503 until all models are ready.

    If API keys are set, only requests with a key get the models and processes. For other requests, these are null.
    """
    if catalog.settings.console and "text/html" in request.headers.get("accept", ""):
        return _file("index.html", request, call)
    if not await catalog.ready():
        raise NotReady(f"unhealthy: {reason}" if (reason := catalog.why_not_ready()) else "unhealthy")
    call.headers["vary"] = "accept, authorization"
    told = not catalog.settings.needs_key or call.tenant is not None
    content = {
        "name": "attnserve",
        "version": version("attnserve"),
        "docs": "/docs",
        "openapi": "/openapi.json",
        "development": catalog.settings.development,
        "models": [{"name": name, "kind": kind_of(model)} for name, model in _models(catalog)] if told else None,
        "processes": _processes(catalog) if told else None,
        "routes": [
            {"method": method.upper(), "path": path, "summary": operation.get("summary", "")}
            for path, operations in (await asyncio.to_thread(request.app.openapi))["paths"].items()
            for method, operation in operations.items()
        ],
    }
    return json_response(content, call)


def _models(catalog: Catalog) -> list[tuple[str, Served]]:
    """Return (name, model) for every served model, then (alias, model) for every alias."""
    if not catalog.models:
        return []
    return [*catalog.models.items(), *((alias, catalog.models[name]) for alias, name in catalog.settings.aliases.items())]


def kind_of(model: Served) -> str:
    """Return the kind of a model as the page `/` names it. Unlike the manifest, it distinguishes decoders that generate pictures."""
    decoder = model.manifest.decoder
    return "decoder of pictures" if decoder is not None and decoder.image is not None else model.manifest.kind


def _processes(catalog: Catalog) -> dict[str, Any]:
    settings, budget = catalog.settings, catalog.budget
    split = settings.profile == "split"
    return {
        "profile": settings.profile,
        **{role: getattr(settings, role) if split else 0 for role in ("gateways", "encoders", "generators")},
        "cpus": budget.cpus,
        "runtime_threads": budget.runtime_threads,
        "tokenizer_threads": budget.tokenizer_threads,
    }


# The console -----------------------------------------------------------------------------------------------------------------------------


class ConsoleFile(NamedTuple):
    content: bytes
    compressed: bytes
    etag: str
    media_type: str


@cache
def _console_files() -> dict[str, ConsoleFile]:
    """Read and compress the console's files, once for each process. They are built from `service/console/source/`."""
    found = {}
    for path in sorted(_CONSOLE.iterdir()):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            etag = f'"{sha256(content).hexdigest()[:16]}"'
            found[path.name] = ConsoleFile(content, gzip.compress(content, 9, mtime=0), etag, f"{_TYPES[path.suffix]}; charset=utf-8")
    return found


@router.get("/console/history", include_in_schema=False)
async def history(request: Request, call: CallDep) -> Response:
    """Return the metrics of the last minute, for the charts of the console."""
    return json_response(await asyncio.to_thread(request.app.history.samples, time.monotonic()), call)


@router.get("/console/{name}", include_in_schema=False)
async def console(name: Annotated[str, PathParameter()], request: Request, call: CallDep, catalog: CatalogDep) -> Response:
    """Return a file of the console."""
    if not catalog.settings.console or name not in await asyncio.to_thread(_console_files):
        raise RouteNotFound(f"there is no /console/{name[:80]}; GET / is the console, unless the service runs with --no-console")
    return _file(name, request, call)


def _file(name: str, request: Request, call: Call) -> Response:
    """Return a file of the console, compressed if the client takes that, or 304 if the client has it. Clients ask again each time, so a
    new version of the service is seen at once."""
    file = _console_files()[name]
    headers = {**call.headers, **_SAFE, "content-security-policy": _CONSOLE_POLICY, "etag": file.etag, "cache-control": "no-cache"}
    headers["vary"] = "accept, accept-encoding, authorization"
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.compressed, headers={**headers, "content-encoding": "gzip"}, media_type=file.media_type)
    return Response(file.content, headers=headers, media_type=file.media_type)


# The OpenAPI document --------------------------------------------------------------------------------------------------------------------


@router.get("/openapi.json", include_in_schema=False)
async def document(request: Request, call: CallDep) -> Response:
    """Return the OpenAPI document. It is built once, on a thread, since building it would block the event loop for too long."""
    return json_response(await asyncio.to_thread(request.app.openapi), call)


@router.get("/docs", include_in_schema=False)
async def docs(call: CallDep) -> Response:
    return _shown("docs.html", call)


@router.get("/redoc", include_in_schema=False)
async def redoc(call: CallDep) -> Response:
    return _shown("redoc.html", call)


def _shown(name: str, call: Call) -> Response:
    headers = {**call.headers, **_SAFE, "content-security-policy": _DOCS_POLICY}
    return FileResponse(_ASSETS / name, headers=headers, media_type="text/html; charset=utf-8")


@router.get("/docs/{name}", include_in_schema=False)
async def asset(name: Annotated[str, PathParameter()], call: CallDep) -> Response:
    """Return a file that `/docs` or `/redoc` loads."""
    if name not in _FILES:
        raise RouteNotFound(f"there is no /docs/{name[:80]}; GET /docs is the page")
    headers = {**call.headers, **_SAFE, "cache-control": "public, max-age=3600"}
    return FileResponse(_ASSETS / name, headers=headers, media_type=f"{_FILES[name]}; charset=utf-8")
