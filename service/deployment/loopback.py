"""Ray's calls between replicas, on one machine: by loopback alone."""

from typing import Any


def keep_calls_on_loopback() -> None:
    """In a replica, before Serve opens the port at which other replicas call it: on every interface, for which it has no setting."""
    from ray.serve._private import replica

    serves: Any = replica
    add_port = serves.add_port_to_grpc_server
    serves.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", "127.0.0.1"))
