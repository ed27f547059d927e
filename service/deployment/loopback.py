"""On one machine, Ray's calls between replicas use loopback only."""

from typing import Any


def keep_calls_on_loopback() -> None:
    """Call it in a replica before Serve opens the port for other replicas. Serve would open it on every interface, and has no setting."""
    from ray.serve._private import replica

    serves: Any = replica
    add_port = serves.add_port_to_grpc_server
    serves.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", "127.0.0.1"))
