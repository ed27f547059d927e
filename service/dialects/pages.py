"""Pages for browsers: `/` describes the service, `/docs` and `/redoc` show the OpenAPI document, `/openapi.json` is the
document.

All files come from this package. The pages load nothing from other origins, and their content security policy forbids it.
`/docs`, `/redoc` and `/openapi.json` need no API key, because a browser has none until its user enters one there, and because
the document contains no model names: it is the same for every installation of a version. If API keys are set, `/` lists the
models only for requests with a key.
"""

import asyncio
import html
import json
import re
import shlex
from base64 import b64encode
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from pydantic import BaseModel

from service.call import Call
from service.catalog import Catalog, Served
from service.dialects.tei.schemas import TeiError
from service.errors import NotReady, RouteNotFound
from service.http.routing import CallDep, CatalogDep, JsonRoute, json_response

_ASSETS = Path(__file__).parents[1] / "docs_assets"
_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "docs.js": "text/javascript",
    "redoc.standalone.js": "text/javascript",
}
_HOST = re.compile(r"[A-Za-z0-9.\-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
pre { background: #f4f4f4; padding: .75rem; overflow-x: auto; font-size: 14px }
table { border-collapse: collapse } td, th { text-align: left; padding: .2rem 1.5rem .2rem 0 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } pre { background: #262626 } a { color: #8ab4f8 } }
"""
_STYLE_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()
_NOTHING_ELSE = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# Swagger UI and Redoc need inline styles and inline SVG images. Redoc's search needs a worker made from a blob.
_DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    f"connect-src 'self'; worker-src blob:; {_NOTHING_ELSE}"
)
_ROOT_POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; {_NOTHING_ELSE}"
_SAFE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

# An example request for each kind of model.
_ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("/v1/embeddings", {"input": "Attention is all you need"}),
    "reranker": ("/v1/rerank", {"query": "What is the capital of France?", "documents": ["Paris is in France.", "Fish swim."]}),
    "classifier": ("/predict", {"inputs": "I like this."}),
    "token_classifier": (
        "/v2/models/{model}/infer",
        {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["I like Paris."]}]},
    ),
    "decoder": ("/v1/completions", {"prompt": "def mean(values):\n", "max_tokens": 64}),
    "encoder_decoder": ("/v1/completions", {"prompt": "forty-two", "max_tokens": 64}),
    "decoder of pictures": ("/v1/images/generations", {"prompt": "7"}),
}


class RootModel_(BaseModel):
    name: str
    kind: str


class RootRoute(BaseModel):
    method: str
    path: str
    summary: str


class Root(BaseModel):
    name: str
    version: str
    docs: str
    openapi: str
    models: list[RootModel_] | None
    routes: list[RootRoute]


router = APIRouter(route_class=JsonRoute, tags=["Operation"])


# The first page ------------------------------------------------------------------------------------------------------------------------


@router.get("/", response_model=Root, responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}, 503: {"model": TeiError}})
async def root(request: Request, call: CallDep, catalog: CatalogDep) -> Response:
    """Return the version, models and routes: a page for browsers (`Accept: text/html`), else JSON. The status is 503 until all
    models are ready.

    If API keys are set, only requests with a key get the models. For other requests, `models` is null.
    """
    ready = await catalog.ready()
    told = not catalog.settings.needs_key or call.tenant is not None
    if "text/html" in request.headers.get("accept", ""):
        page = _page(catalog, request.headers.get("host", ""), told=told, ready=ready)
        headers = {**call.headers, **_SAFE, "content-security-policy": _ROOT_POLICY, "vary": "accept, authorization"}
        return Response(page, 200 if ready else 503, headers, "text/html; charset=utf-8")
    if not ready:
        raise NotReady(f"unhealthy: {catalog.failure}" if catalog.failure else "unhealthy")
    call.headers["vary"] = "accept, authorization"
    content = {
        "name": "attnserve",
        "version": version("attnserve"),
        "docs": "/docs",
        "openapi": "/openapi.json",
        "models": [{"name": name, "kind": kind_of(model)} for name, model in _models(catalog)] if told else None,
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


def _page(catalog: Catalog, host: str, *, told: bool, ready: bool) -> str:
    """Return the page `/` as HTML. `told` is whether the page lists the models. Every value that is not a constant is escaped."""
    models = _models(catalog) if told else []
    asked = {kind_of(model): name for name, model in reversed(models)} if models else dict.fromkeys(_ASKED)
    address = f"http://{host if _HOST.fullmatch(host) else f'127.0.0.1:{catalog.settings.port}'}"
    key = ' -H "authorization: Bearer $ATTNSERVE_API_KEY"' if catalog.settings.needs_key else ""
    state = "" if ready else f"<p><b>Not ready:</b> {html.escape(catalog.failure or catalog.sick() or 'models are being loaded')}</p>"
    rows = "".join(f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(kind_of(model))}</td></tr>" for name, model in models)
    table = f"<table><tr><th>model</th><th>kind</th></tr>{rows}</table>" if rows else ""
    hidden = "" if told else "<p>Requests with an API key see the models here.</p>"
    examples = "".join(
        f"<h3>{html.escape(kind)}</h3><pre>{html.escape(_curl(address, key, kind, name))}</pre>"
        for kind, name in asked.items()
        if kind in _ASKED
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>attnserve</title>
<link rel="icon" href="data:,"><style>{_STYLE}</style></head>
<body>
<h1>attnserve {html.escape(version("attnserve"))}</h1>
<p>Attention models over HTTP: embeddings, rerank scores and text, in the forms of several APIs.</p>
{state}<p><a href="/docs">/docs</a> tries every route, <a href="/redoc">/redoc</a> describes them,
<a href="/openapi.json">/openapi.json</a> is for programs; <a href="/metrics">/metrics</a>, <a href="/health">/health</a>.</p>
<h2>Models</h2>
{hidden}{table}
<h2>Examples</h2>
{examples}
</body>
</html>
"""


def _curl(address: str, key: str, kind: str, name: str | None) -> str:
    path, body = _ASKED[kind]
    named = body if name is None or "{model}" in path else {"model": name, **body}
    content = json.dumps(named, ensure_ascii=False)
    return f"curl -s {address}{path.format(model=name or 'MODEL')} -H 'content-type: application/json'{key} \\\n  -d {shlex.quote(content)}"


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
