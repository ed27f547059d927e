"""All uses of undocumented parts of Ray, each with the reason why no documented setting suffices.

The undocumented parts were found in the sources of Ray 2.60. Before you use another version, read the source files that each function
names; `tests/service/deployment/test_ray_private.py` fails until `READ_FROM` is the new version. Import this module late: Ray must be
imported after `flags.prepare`.
"""

from pathlib import Path
from typing import Any

import ray
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

READ_FROM = "2.60"

REPLICAS: dict[str, tuple[str, ...]] = {}  # deployment -> names of the replicas that this process can call


def start_ray(run: Path, *, cpus: int, object_store_bytes: int) -> dict[str, Any]:
    """Start a private Ray on loopback, with its files in the directory `run`. Returns its address, and the process ids of the raylet and of
    the GCS.

    `ray.init` has no parameters for the following. First, an address on loopback: it replaces 127.0.0.1 by the machine's address, as `ray
    start` does, which opens every port to the network. Second, a start without log monitor, autoscaler, API server and agents, each of
    which is a Python process that Ray starts even if usage statistics and dashboard are off. This relies on `ray/_private/worker.py`
    (init), `parameter.py`, `node.py` (start_head_processes) and `services.py` (start_api_server, start_raylet).
    """
    from ray._private import parameter, services

    make_parameters, start_api_server, start_process = parameter.RayParams, services.start_api_server, services.start_ray_process
    ours = {"node_ip_address": "127.0.0.1", "no_monitor": True, "include_log_monitor": False}
    parameter.RayParams = lambda **given: make_parameters(**{**given, **ours})  # type: ignore[misc, assignment]
    services.start_api_server = lambda *_, **__: (None, None)
    services.start_ray_process = lambda command, *rest, **named: start_process(without_agents(command), *rest, **named)
    try:
        ray.init(
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            log_to_driver=False,
            configure_logging=False,
            namespace="serve",
            _temp_dir=str(run),
        )
    finally:
        parameter.RayParams, services.start_api_server = make_parameters, start_api_server  # type: ignore[misc]
        services.start_ray_process = start_process
    node: Any = ray._private.worker._global_node
    pids = {kind: node.all_processes[kind][0].process.pid for kind in ("raylet", "gcs_server")}
    return {"address": node.gcs_address, **pids}


def connect(address: str) -> None:
    """Connect this process to the Ray at `address`, which `start_ray` has started on loopback.

    `ray.init` replaces 127.0.0.1 by the machine's address, as when it starts Ray. This relies on `ray/_private/services.py`
    (canonicalize_bootstrap_address).
    """
    from ray._private import services

    resolve = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        ray.init(address, _node_ip_address="127.0.0.1", namespace="serve", log_to_driver=False, configure_logging=False)
    finally:
        services.resolve_ip_for_localhost = resolve


def without_agents(command: list[str]) -> list[str]:
    """Return the raylet's command, without its two agents. Any other command is returned as it is.

    The agents install runtime environments and send metrics, neither of which is used on one machine. But the raylet insists on two
    commands, ends when one of them ends, and waits until they have told their ports. It gets `cat`, which reads the pipe from the raylet
    until the raylet has ended (RAY_enable_pipe_based_agent_to_parent_health_check), and ports at which nobody listens. The shell drops
    the arguments that the raylet adds.
    """
    kept = [word for word in command if not word.startswith(_AGENTS)]
    if len(kept) == len(command):
        return command
    return [*kept, *(agent + 'sh -c "exec cat"' for agent in _AGENTS), *(f"--{port}={_NOBODY}" for port in _AGENT_PORTS)]


_AGENTS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
_NOBODY = 1  # a port that only a privileged process can open


def keep_calls_on_loopback() -> None:
    """Make Serve open the port for calls from other replicas on 127.0.0.1 only, for a service on one machine. Serve itself opens the port
    on all interfaces, and has no setting for it.

    Call this in a replica before Serve opens the port. This relies on `ray/serve/_private/replica.py`.
    """
    from ray.serve._private import replica

    serves: Any = replica
    add_port = serves.add_port_to_grpc_server
    serves.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", "127.0.0.1"))


def gpus_here() -> int:
    """Return the number of GPUs that Ray will find on this machine: those that NVIDIA's driver reports, limited by
    CUDA_VISIBLE_DEVICES.

    Ray itself reports this number only while it runs. This relies on `ray/_private/accelerators/nvidia_gpu.py`.
    """
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    count = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    return count if visible is None else min(count, len(visible))


def deployments_of(application: Any, name: str) -> list[Any]:
    """Return a Serve application's deployments, to be written into its configuration file. Serve itself offers this only as the command
    `serve build`.

    This relies on `ray/serve/_private/build_app.py`.
    """
    from ray.serve._private.build_app import build_app

    return list(build_app(application, name=name).deployments)


class ReplicaNotFound(Exception):
    """The named replica has ended, or did not accept the call."""


class ByName(RequestRouter):
    """Sends a call only to the replica whose name is the call's session id. The caller decides whether the call may be repeated elsewhere.

    The documented `choose_replicas` only ranks candidates, and if the first candidate refuses a call, Ray sends the call to another one.
    Therefore this class overrides the method that calls `choose_replicas`, which relies on
    `ray/serve/_private/request_router/request_router.py`. Ray pickles this class by value, so in another process it would use copies of
    this module's objects. Therefore its methods import REPLICAS and ReplicaNotFound when they run.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from service.deployment.ray_private import REPLICAS

        super().update_replicas(replicas)
        REPLICAS[self._deployment_id.name] = tuple(sorted(replica.replica_id.unique_id for replica in replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Never called. It is defined only because it is abstract in the base class."""
        raise NotImplementedError

    async def _choose_replica_for_request(self, pending_request: PendingRequest, *, is_retry: bool = False) -> Any:
        from service.deployment.ray_private import ReplicaNotFound

        name = pending_request.metadata.session_id
        found = [replica for replica in self.curr_replicas.values() if replica.replica_id.unique_id == name]
        if is_retry or not found:
            raise ReplicaNotFound(f"replica {name} has left")
        return found[0]
