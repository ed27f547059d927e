"""Profile `split`: gateways accept requests, and pools of replicas compute. Only gateways handle HTTP; only replicas hold models.

A gateway chooses the replica of each call (`service/pools/replicas.py`), and sends it over a socket (`service/pools/transport.py`). Serve
starts, checks, replaces and stops the replicas, and its router (`ray_private.py`) names them and carries one call: for a replica's address.
"""

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from ray.serve.metrics import Gauge

from export import contract
from service.catalog import Catalog
from service.deployment.flags import shutdown_s
from service.deployment.ingress import WarmIngress, options_of_serve
from service.deployment.lifeline import Lifeline, keep_files_in
from service.deployment.ray_metrics import keep_copying
from service.deployment.ray_private import REPLICAS, ByName, ReplicaNotFound, keep_calls_on_loopback
from service.deployment.scaling import ENCODER_TARGET, GATEWAY_TARGET, GENERATOR_TARGET, LOAD, autoscaling, replica_gpus
from service.errors import CANNOT_START
from service.pools.catalog import GatewayCatalog
from service.pools.host import METHODS, Host
from service.pools.replicas import ReplicaLost
from service.pools.transport import Address, Listener, SocketPool
from service.runtime.budget import available_cpus, share_out
from service.settings import Settings, SettingsError, freeze, live, load
from service.states.opening import check
from service.telemetry.logs import to_file

_GATEWAY_CPUS = 1
_ROUTER = f"{ByName.__module__}.{ByName.__name__}"


def socket_pool(handle: DeploymentHandle[Any]) -> SocketPool:
    """Return the replicas of a Serve handle as a pool."""
    asked: Any = handle.options(method_name="address")  # made at once, because this starts the router that finds the replicas

    async def address(replica: str) -> Address:
        try:
            found: Address = await asked.options(session_id=replica).remote()
        except (ReplicaNotFound, RayActorError, grpc.aio.AioRpcError) as error:
            raise ReplicaLost(f"the replica has left: {type(error).__name__}") from None
        return found

    return SocketPool(lambda: REPLICAS.get(handle.deployment_name, ()), address)


@serve.deployment
class PoolReplica(Host):
    """One process of a pool, which runs models."""

    async def __init__(self, frozen: str, log_file: str | None) -> None:  # type: ignore[misc]
        # Serve's configuration may reserve more or fewer CPUs (`ray_actor_options`) than `build`, as for pools on nodes of different sizes.
        reserved = int(ray.get_runtime_context().get_assigned_resources()["CPU"])  # type: ignore[no-untyped-call]
        settings = Settings.model_validate_json(frozen).model_copy(update={"threads": reserved})
        to_file(Path(log_file) if log_file else None, settings.log_level)
        if log_file:
            keep_files_in(Path(log_file).parent)
            keep_calls_on_loopback()
            Lifeline(Path(log_file).parent, serve.get_replica_context().deployment, os.getpid()).beat(asyncio.get_running_loop())
        super().__init__(Catalog(settings))
        self._listener = Listener(self, METHODS)
        try:
            await self.start()
            folder = Path(log_file).parent if log_file else None
            self._address = await self._listener.start(folder=folder, host="" if folder else str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]
        except Exception as error:  # the user who deploys sees only the message, so it must contain the reason
            raise RuntimeError(f"{CANNOT_START}: {error}") from error
        _export(self.catalog)

    async def address(self) -> Address:
        """Return the address at which this replica takes the calls of gateways, with the secret that they send first."""
        return self._address

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        self.catalog.reconfigure(user_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {LOAD: self.load()}

    async def __del__(self) -> None:
        """Finish the calls of gateways. Serve calls this when it stops the replica, and waits for `graceful_shutdown_timeout_s` at most."""
        await self._listener.finish()
        await self.catalog.stop()


@serve.deployment
@serve.ingress()
class Gateway(WarmIngress):
    """One process that accepts requests and calls the pools."""

    def __init__(
        self,
        frozen: str,
        log_file: str | None,
        own_keys: bool,
        encoders: DeploymentHandle[Any] | None,
        generators: DeploymentHandle[Any] | None,
    ) -> None:
        from service.deployment import replica

        def make_catalog(settings: Settings) -> GatewayCatalog:
            catalog = GatewayCatalog(
                settings, encoders=socket_pool(encoders) if encoders else None, generators=socket_pool(generators) if generators else None
            )
            _export(catalog)
            return catalog

        if log_file:
            keep_calls_on_loopback()
        self._app = replica.start(with_keys(frozen) if own_keys else frozen, log_file, make_catalog)
        self._seen: tuple[float, float] | None = None

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the CPU time of this process since the previous call, as a share of the process's reserved CPU time, or 0 at the first
        call.

        The number of requests in progress is not used: it is also high if a pool is slow or streams are long, and then more gateways do not
        help.
        """
        seen = time.monotonic(), time.process_time()
        (before, took_s), self._seen = self._seen or seen, seen
        return {LOAD: (seen[1] - took_s) / max(seen[0] - before, 1e-3) / _GATEWAY_CPUS}


def _export(catalog: Catalog) -> None:
    """Start to copy this process's metrics to Ray's exporter, unless `flags.prepare` has turned it off, as on one machine."""
    if os.environ.get("RAY_enable_metrics_collection") != "0":  # noqa: SIM112  Ray's own spelling
        copied = catalog.metrics.registry, Gauge
        threading.Thread(target=keep_copying, args=copied, name="ray-metrics", daemon=True).start()


def application(args: dict[str, Any]) -> Any:
    """Return the Serve application; `import_path` in Serve's configuration names this function. Settings come from `args` and
    `settings.load`.

    API keys are left out, because Ray stores a deployment's arguments in the GCS and its Redis. Each gateway reads the API keys on its own
    node, from the environment or from the file whose path is in `args`.
    """
    settings = load({**args, "profile": "split"})
    check(settings)
    return build(settings.model_copy(update={"api_keys": ()}), None, own_keys=bool(settings.api_keys))


def with_keys(frozen: str) -> str:
    """Return the settings with the API keys of this process's environment. Raises SettingsError if there are no API keys, because the
    service would then admit everyone.
    """
    keys = load({}).api_keys
    if not keys:
        raise SettingsError("the cluster's head has ATTNSERVE_API_KEYS, but this node does not: set it on every node")
    return freeze(Settings.model_validate_json(frozen).model_copy(update={"api_keys": keys}))


def build(settings: Settings, log_file: Path | None, *, own_keys: bool = False) -> Any:
    """Return the Serve application. A pool for which there is no bundle is left out. If `own_keys` is True, each gateway uses the API keys
    of its own node. `log_file` is None on a cluster.
    """
    path = log_file and str(log_file)
    kinds = {bundle: contract.read_manifest(bundle).kind for bundle in settings.bundles}
    # Only gateways look models up by their other names, which may be names of the other pool's models.
    without: dict[str, Any] = {"aliases": {}, "default_model": (), "api_keys": (), "api_keys_file": None}
    computing = settings.model_copy(update={"threads": threads(settings), **without})
    targets: dict[contract.Pool, float] = {"encoder": ENCODER_TARGET, "generator": GENERATOR_TARGET}
    pools: dict[contract.Pool, Any] = dict.fromkeys(targets)
    for pool, target in targets.items():
        if own := {bundle: kind for bundle, kind in kinds.items() if contract.KINDS[kind].pool == pool}:
            resources = {"num_cpus": threads(settings), "num_gpus": replica_gpus(settings, own.values())}
            options = {**_options(settings, pool, target), "request_router_config": {"request_router_class": _ROUTER}}
            frozen = freeze(computing.model_copy(update={"bundles": tuple(own)}))
            pools[pool] = PoolReplica.options(name=pool, ray_actor_options=resources, **options).bind(frozen, path)  # type: ignore[attr-defined]
    options = _options(settings, "gateway", GATEWAY_TARGET)
    gateway = Gateway.options(name="gateway", ray_actor_options={"num_cpus": _GATEWAY_CPUS}, **options)  # type: ignore[attr-defined]
    return gateway.bind(freeze(settings), path, own_keys, *pools.values())


def threads(settings: Settings) -> int:
    """Return the number of runtime threads of one replica. By default the replicas of one pool share this machine's CPUs equally. The
    two pools do not divide the CPUs between them, so that one pool can use every CPU while the other pool is idle.
    """
    return settings.threads or max(share_out(available_cpus()).runtime_threads // max(settings.encoders, settings.generators), 1)


def cpus(settings: Settings) -> int:
    """Return the number of CPUs that all replicas together reserve in Ray when each pool has its largest number of replicas."""
    return settings.most("gateways") * _GATEWAY_CPUS + (settings.most("encoders") + settings.most("generators")) * threads(settings)


def _options(settings: Settings, role: str, target: float) -> dict[str, Any]:
    """Return the Serve options of a role's deployment: the options that all deployments share, and its number of replicas or
    autoscaling.
    """
    least, most = getattr(settings, f"{role}s"), getattr(settings, f"max_{role}s")
    replicas = {"num_replicas": least} if most is None else {"autoscaling_config": autoscaling(least, most, target)}
    return {**options_of_serve(shutdown_s(settings)), "user_config": live(settings), **replicas}
