"""Where a replica of one machine takes calls from others."""

import asyncio
import inspect
import warnings
from types import ModuleType

import grpc
import pytest

from service.deployment.loopback import keep_calls_on_loopback


def of_serve() -> ModuleType:
    """Serve's replica, imported: Ray's own declarations warn, and warnings fail tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.serve._private import replica
    return replica


def test_calls_between_replicas_are_taken_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = of_serve()
    asked: list[str] = []

    def add_port(server: grpc.aio.Server, address: str) -> int:
        asked.append(address)
        return server.add_insecure_port(address)

    monkeypatch.setattr(replica, "add_port_to_grpc_server", add_port)
    keep_calls_on_loopback()

    async def listen() -> int:
        server = grpc.aio.server()
        return int(replica.add_port_to_grpc_server(server, "[::]:0"))  # as in Serve's own code

    assert asyncio.run(listen()) > 0
    assert asked == ["127.0.0.1:0"]


def test_serve_still_writes_the_address_that_is_replaced() -> None:
    calls = [line.strip() for line in inspect.getsource(of_serve()).splitlines() if "add_port_to_grpc_server(" in line]
    assert calls == ['self._internal_grpc_port = add_port_to_grpc_server(self._server, "[::]:0")']
