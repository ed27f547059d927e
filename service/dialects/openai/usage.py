"""The route `/v1/usage`, which returns the numbers of requests and tokens of the caller's tenant.

OpenAI has no such route, but the format resembles OpenAI's other routes. The counts are in the store, for all gateways that share it.
If the store is away or in memory, they are those of this process, from its start on.
"""

from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from service.dialects.openai.embeddings import OpenAIErrorResponse
from service.errors import RouteNotFound
from service.http.edge import USAGE_PATH
from service.http.routing import CallDep, CatalogDep, JsonRoute
from service.http.tenants import Tenant, UsageCounts


class ModelUsage(BaseModel):
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TenantUsage(BaseModel):
    object: Literal["usage"]
    tenant: str
    key: str = Field(description="The name of the key that asks; the counts are of all keys of the tenant.")
    since: int = Field(description="Seconds since the epoch.")
    scope: Literal["store", "gateway", "process"] = Field(
        description="`store`: the counts of all gateways that share the store, up to a second old. Otherwise those of this process since "
        "its start; `gateway`: of several that answer, each with counts of its own."
    )
    requests: int = Field(description="Requests that a model answered.")
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    models: list[ModelUsage]


_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": OpenAIErrorResponse} for status in (400, 401, 404, 500, 503)}
router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=_ERRORS)


@router.get(USAGE_PATH, response_model=TenantUsage)
async def usage(call: CallDep, catalog: CatalogDep) -> Any:
    """Return the usage of the tenant that owns the request's API key, by model. Requests to this route do not count towards any limit."""
    tenant = call.tenant
    if not isinstance(tenant, Tenant):
        raise RouteNotFound("there is no usage here: it is counted by API key, and this service has none; see the setting api_keys_file")
    since, models, shared = await tenant.used()
    total = UsageCounts()
    for counts in models.values():
        total.add(counts.requests, counts.prompt_tokens, counts.completion_tokens)
    return {
        "object": "usage",
        "tenant": tenant.name,
        "key": call.key,
        "since": since,
        "scope": "store" if shared else "gateway" if catalog.settings.profile == "split" else "process",
        **_counts(total),
        "models": [{"model": name, **_counts(counts)} for name, counts in sorted(models.items())],
    }


def _counts(used: UsageCounts) -> dict[str, int]:
    return {**asdict(used), "total_tokens": used.prompt_tokens + used.completion_tokens}
