"""The route `/v1/development/kill`, which kills the process that generates text. It exists only with the setting `development`.

The console uses it to show that a stream goes on after a crash. The client must come back by itself: the killed process may be the one
that sends the stream.
"""

import asyncio
import os
import signal
from typing import Any

import psutil
from fastapi import APIRouter
from pydantic import BaseModel

from service.dialects.openai.embeddings import ERRORS
from service.errors import RouteNotFound
from service.http.routing import CatalogDep, JsonRoute

_GENERATOR = "ServeReplica:attnserve:generator"  # in the title of every generator of profile split
_ANSWER_S = 0.1  # this process is killed so many seconds after the answer was made
_LOOK_S = 0.1  # seconds for which the CPU time of each generator is measured


class Killed(BaseModel):
    pid: int
    process: str


router = APIRouter(route_class=JsonRoute, tags=["Development"], responses=ERRORS)


@router.post("/v1/development/kill", response_model=Killed)
async def kill(catalog: CatalogDep) -> Any:
    """Kill the process that generates text (SIGKILL). In profile single that is the whole service, which starts again within seconds."""
    if not catalog.settings.development:
        raise RouteNotFound("/v1/development/kill exists only if the service was started with --development")
    generator = await asyncio.to_thread(_busiest_generator)
    if generator is None:
        asyncio.get_running_loop().call_later(_ANSWER_S, os.kill, os.getpid(), signal.SIGKILL)
        return {"pid": os.getpid(), "process": "service"}
    generator.send_signal(signal.SIGKILL)
    return {"pid": generator.pid, "process": "generator"}


def _busiest_generator() -> psutil.Process | None:
    """Return the generator of this service that computes most, or None in profile single. Blocks for `_LOOK_S` seconds for each."""
    parent = psutil.Process().parent()
    brothers = [] if parent is None else parent.children()
    generators = [process for process in brothers if _GENERATOR in "".join(process.cmdline())]
    return max(generators, key=lambda process: process.cpu_percent(_LOOK_S), default=None)
