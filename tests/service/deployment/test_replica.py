"""A replica on one machine accepts connections at the socket that it gets from the command."""

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from service.deployment import lifeline, replica
from service.settings import Settings, freeze
from tests.service.fakes import PATIENCE_S

APPLICATION: Any = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What the command would send, without the command."""
    listening = socket.create_server(("127.0.0.1", 0))

    class Line:
        def __init__(self, run: Path, kind: str, pid: int) -> None: ...

        def beat(self, loop: object) -> None: ...

        def await_drain(self, loop: object, drain: object) -> None: ...

        def listener(self) -> socket.socket:
            return listening

    monkeypatch.setattr(lifeline, "Lifeline", Line)
    with listening:
        yield listening


def catalog() -> Any:
    return SimpleNamespace(warm=asyncio.Event(), drain=None)


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        (Settings(), False),
        (Settings(profile="split"), False),
        (Settings(profile="split", gateways=2), True),
        (Settings(profile="split", max_gateways=3), True),
    ],
    ids=["single", "one gateway", "two gateways", "up to three gateways"],
)
def test_only_one_of_several_gateways_waits(settings: Settings, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each keeps its temporary files in the run directory."""
    told: list[bool] = []
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("service.app.build_app", "service.http.connections.install", "service.telemetry.logs.to_file"):
        monkeypatch.setattr(name, lambda *_, **__: None)
    for name in ("catalog", "_application"):
        monkeypatch.setattr(replica, name, None)
    monkeypatch.setattr(replica, "_serve_in_lifespan", lambda *_, once_warm: told.append(once_warm))
    replica.start(freeze(settings), str(tmp_path / "replica.log"), lambda given: catalog())
    assert tempfile.gettempdir() == str(tmp_path)
    assert told == [waits]


async def test_one_of_several_gateways_lets_requests_wait_until_its_models_are_loaded(listener: socket.socket, tmp_path: Path) -> None:
    """It refused them with 503, and HAProxy sent only those with small bodies to another gateway."""
    loading = catalog()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    async with replica._serving(APPLICATION, tmp_path, loading, once_warm=True), httpx.AsyncClient() as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get(url, timeout=httpx.Timeout(PATIENCE_S, read=0.2))
        waiting = asyncio.create_task(client.get(url, timeout=PATIENCE_S))
        loading.warm.set()
        assert (await waiting).text == "here"


async def test_a_lone_replica_answers_while_its_models_are_loaded(listener: socket.socket, tmp_path: Path) -> None:
    async with replica._serving(APPLICATION, tmp_path, catalog(), once_warm=False), httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout=PATIENCE_S)).text == "here"


async def test_it_ends_before_its_models_are_loaded(listener: socket.socket, tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_S) as limit, replica._serving(APPLICATION, tmp_path, catalog(), once_warm=True):
        pass
    assert not limit.expired(), "it waited for the models"
