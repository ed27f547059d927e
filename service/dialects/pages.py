"""Pages for browsers: `/` is the console, `/docs` and `/redoc` show the OpenAPI document, `/openapi.json` is the document.

All files come from this package. The pages load nothing from other origins, and their content security policy forbids it.
These pages need no API key, because a browser has none until its user enters one there, and because they contain no model names:
they are the same for every installation of a version. The console asks the routes that other clients use, with the key of its user.
"""

import asyncio
import mimetypes
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from service.call import Call
from service.catalog import Catalog, Served
from service.dialects.tei.schemas import TeiError
from service.errors import NotReady, RouteNotFound
from service.http.routing import CallDep, CatalogDep, JsonRoute, json_response

_ASSETS = Path(__file__).parents[1] / "docs_assets"
_CONSOLE = Path(__file__).parents[1] / "console" / "static"
_NOTHING_ELSE = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# Swagger UI and Redoc need inline styles and inline SVG images. Redoc's search needs a worker made from a blob.
_DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    f"connect-src 'self'; worker-src blob:; {_NOTHING_ELSE}"
)
# Browsers ask for the console's files again each time, so a new version of the service is seen at once.
_OF_CONSOLE = {"content_security_policy": f"default-src 'self'; object-src 'none'; {_NOTHING_ELSE}", "cache_control": "no-cache"}
mimetypes.add_type("text/javascript", ".js")  # the table of some systems has another type
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
        call.headers["vary"] = "accept, authorization"
        return await _file(_CONSOLE, "index.html", request, call, **_OF_CONSOLE)
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


@router.get("/console/history", include_in_schema=False)
async def history(request: Request, call: CallDep) -> Response:
    """Return the metrics of the last minute, for the charts of the console."""
    return json_response(await asyncio.to_thread(request.app.history.samples, time.monotonic()), call)


@router.get("/console/{name}", include_in_schema=False)
async def console(name: Annotated[str, PathParameter()], request: Request, call: CallDep, catalog: CatalogDep) -> Response:
    """Return a file of the console."""
    if not catalog.settings.console:
        raise RouteNotFound("there is no /console: the service runs with --no-console")
    return await _file(_CONSOLE, name, request, call, **_OF_CONSOLE)


# The OpenAPI document --------------------------------------------------------------------------------------------------------------------


@router.get("/openapi.json", include_in_schema=False)
async def document(request: Request, call: CallDep) -> Response:
    """Return the OpenAPI document. It is built once, on a thread, since building it would block the event loop for too long."""
    return json_response(await asyncio.to_thread(request.app.openapi), call)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request, call: CallDep) -> Response:
    return await _file(_ASSETS, "docs.html", request, call, content_security_policy=_DOCS_POLICY)


@router.get("/redoc", include_in_schema=False)
async def redoc(request: Request, call: CallDep) -> Response:
    return await _file(_ASSETS, "redoc.html", request, call, content_security_policy=_DOCS_POLICY)


@router.get("/docs/{name}", include_in_schema=False)
async def asset(name: Annotated[str, PathParameter()], request: Request, call: CallDep) -> Response:
    """Return a file that `/docs` or `/redoc` loads."""
    if not name.endswith((".js", ".css")):
        raise RouteNotFound(f"there is no /docs/{name[:80]}; GET /docs is the page")
    return await _file(_ASSETS, name, request, call, cache_control="public, max-age=3600")


async def _file(folder: Path, name: str, request: Request, call: Call, **headers: str) -> Response:
    """Return a file of this package with these headers, or 304 if the client has it. Raises RouteNotFound."""
    try:
        response = await StaticFiles(directory=folder).get_response(name, request.scope)
    except HTTPException:
        raise RouteNotFound(f"there is no file {name[:80]} here; GET / is the console, and GET /docs the documentation") from None
    response.headers.update({**call.headers, **_SAFE, **{name.replace("_", "-"): value for name, value in headers.items()}})
    response.headers["etag"] = f"W/{response.headers['etag']}"  # weak, so that the answer may be compressed
    return response
