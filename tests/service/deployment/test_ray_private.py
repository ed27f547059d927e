"""The use of what Ray does not document: one file, one version of Ray, and sources that still read as they did."""

import ast
import asyncio
import inspect
import warnings
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import grpc
import pytest

from tests.imports import ROOT

with warnings.catch_warnings():  # Ray's own, at import
    warnings.simplefilter("ignore")
    from service.deployment import ray_private

PRIVATE = ROOT / "service" / "deployment" / "ray_private.py"
OPTIONS = {"_temp_dir", "_by_reference", "_node_ip_address", "_system_config"}  # of public functions, not documented


def test_ray_is_the_version_that_was_read() -> None:
    installed = ".".join(version("ray").split(".")[:2])
    assert installed == ray_private.READ_FROM, (
        f"Ray {installed} is installed and {PRIVATE.name} was read from {ray_private.READ_FROM}: read the sources that its functions name, "
        "run the tests of this folder, then set READ_FROM"
    )


def private_uses(file: Path) -> set[str]:
    """Modules of Ray with an underscore that a file imports, attributes `ray._x`, and undocumented options."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            names = []
            found |= {str(node.arg)} & OPTIONS if isinstance(node, ast.keyword) else set()
        found |= {name for name in names if name.startswith("ray.") and "._" in name}
    return found


def test_one_file_uses_what_ray_does_not_document() -> None:
    files = [file for package in ("service", "loadtest", "deploy") for file in (ROOT / package).rglob("*.py")]
    assert {file.name for file in files if private_uses(file)} == {PRIVATE.name}


def of_serve() -> ModuleType:
    """Serve's replica."""
    from ray.serve._private import replica

    return replica


def test_calls_between_replicas_are_taken_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = of_serve()
    asked: list[str] = []

    def add_port(server: grpc.aio.Server, address: str) -> int:
        asked.append(address)
        return server.add_insecure_port(address)

    monkeypatch.setattr(replica, "add_port_to_grpc_server", add_port)
    ray_private.keep_calls_on_loopback()

    async def listen() -> int:
        server = grpc.aio.server()
        return int(replica.add_port_to_grpc_server(server, "[::]:0"))  # as in Serve's own code

    assert asyncio.run(listen()) > 0
    assert asked == ["127.0.0.1:0"]


def test_the_raylet_gets_no_agents() -> None:
    agents = ["--dashboard_agent_command=python agent.py --head", "--runtime_env_agent_command=python main.py"]
    command = ray_private.without_agents(["raylet", *agents, "--head"])
    assert [word for word in command if "python" in word] == []
    assert {"raylet", "--head", '--dashboard_agent_command=sh -c "exec cat"', "--runtime_env_agent_port=1"} <= set(command)
    assert ray_private.without_agents(["gcs_server", "--head"]) == ["gcs_server", "--head"]


def test_ray_still_starts_agents_by_the_words_that_are_replaced() -> None:
    from ray._private import services

    source = inspect.getsource(services.start_raylet)
    assert [word for word in ray_private._AGENTS if word not in source] == []
    assert "process_info = start_ray_process(\n        command,\n" in source
