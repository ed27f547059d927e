"""The route `/v1/stream/{run}`, which continues a stream by the id of its run.

A client can also continue a stream by sending its original request again with the header `Last-Event-ID`. This route needs no body, and
its first event has an id and no data, as browsers expect. The parameter `from` has the meaning that it has in llama.cpp's resumable
streams.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from service.call import LAST_EVENT_HEADER
from service.dialects.openai import chat, completions
from service.dialects.openai.embeddings import ERRORS
from service.dialects.text.pipeline import resume
from service.dialects.text.schemas import STREAM
from service.errors import InvalidRequest, RunNotFound
from service.http.routing import CallDep, CatalogDep, JsonRoute
from service.streams.position import RUN, EventId, Place

_MOST = 10**9
Tokens = Annotated[int | None, Query(ge=0, lt=_MOST, description="Tokens of each choice that the client has.")]

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.get("/v1/stream/{run}", response_class=Response, responses=STREAM)
async def stream(
    run: Annotated[str, Path(max_length=64)],
    call: CallDep,
    catalog: CatalogDep,
    from_: Annotated[Tokens, Query(alias="from")] = None,
    starting_after: Tokens = None,
) -> Any:
    """Continue a stream. It begins after the event whose id is in the header `Last-Event-ID`, or else after `from` or `starting_after`
    tokens of each choice. Without any of these, it begins at the first token."""
    if RUN.fullmatch(run) is None:
        raise RunNotFound(f"there is no run {run}: the header x-run-id of a stream has its id", param="run")
    if call.last_event_id is not None:
        wanted = EventId.parse(call.last_event_id, LAST_EVENT_HEADER)
        if wanted.run != run:
            raise InvalidRequest(f"{LAST_EVENT_HEADER} is of the run {wanted.run}, and the path is of {run}", param=LAST_EVENT_HEADER)
    else:
        param, tokens = ("starting_after", starting_after or 0) if from_ is None else ("from", from_)
        wanted = EventId(run, (Place(tokens),), param=param)
    call.priming = True
    return await resume(wanted, (completions.ROUTE, chat.ROUTE), call, catalog)
