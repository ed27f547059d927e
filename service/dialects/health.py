"""The routes for health probes and metrics. They need no API key."""

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from service.http.routing import CatalogDep, JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["Operation"], default_response_class=PlainTextResponse)


@router.get("/health/live")
async def live() -> Response:
    """Return 200 as soon as the process can answer requests."""
    return PlainTextResponse("live")


@router.get("/health/ready", responses={503: {"description": "Still warming up, failing, or shutting down"}})
async def ready(catalog: CatalogDep) -> Response:
    """Return 200 if every model is ready, its most recent run succeeded, and the store of states can be used, else 503, with the reason if
    it is known."""
    if await catalog.ready():
        return PlainTextResponse("ready")
    return PlainTextResponse(catalog.why_not_ready() or "not ready", 503)


@router.get("/metrics")
async def metrics(catalog: CatalogDep) -> Response:
    """Return all metrics in Prometheus's text format."""
    return Response(catalog.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
