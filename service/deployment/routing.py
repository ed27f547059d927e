"""Calls to the replicas of a pool by name. `service/pools/replicas.py` chooses the replica of each call."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

NAMES: dict[str, tuple[str, ...]] = {}  # by deployment, those of its replicas that this process can call


class NotThere(Exception):
    """The named replica has left, or did not accept the call."""


class ByName(RequestRouter):
    """Sends a call to the replica whose name is its session id, and to no other: whether it may be repeated depends on the call.

    Ray sends this class to its processes by value: what it shares with other modules there, it has to import.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from service.deployment.routing import NAMES

        super().update_replicas(replicas)
        NAMES[self._deployment_id.name] = tuple(sorted(replica.replica_id.unique_id for replica in replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ray asks this of a router that has a choice."""
        raise NotImplementedError

    async def _choose_replica_for_request(self, pending_request: PendingRequest, *, is_retry: bool = False) -> Any:
        from service.deployment.routing import NotThere

        name = pending_request.metadata.session_id
        found = [replica for replica in self._replicas.values() if replica.replica_id.unique_id == name]
        if is_retry or not found:
            raise NotThere(f"replica {name} has left")
        return found[0]
