"""Probes and metrics, for operators. They need no key."""

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from service.http.routing import CatalogDep, JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["Operation"], default_response_class=PlainTextResponse)


@router.get("/health/live")
async def live() -> Response:
    """200 as soon as the process answers at all."""
    return PlainTextResponse("live")


@router.get("/health/ready", responses={503: {"description": "Still warming up, failing, or shutting down"}})
async def ready(catalog: CatalogDep) -> Response:
    """200 when every model is warm and its last run succeeded, 503 otherwise; the body says why where it is known."""
    if await catalog.ready():
        return PlainTextResponse("ready")
    return PlainTextResponse(catalog.failure or catalog.sick() or "not ready", 503, {"retry-after": "1"})


@router.get("/metrics")
async def metrics(catalog: CatalogDep) -> Response:
    """All series in Prometheus text form."""
    return Response(catalog.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
