"""Profile `split`: gateways take requests, and pools of replicas compute. Only gateways know HTTP, only replicas have sessions.

A gateway chooses the replica of each call (`service/pools/replicas.py`), and Serve's router sends the call there (`ray_private.py`). Calls
go by value over gRPC; see `service/pools/` for what they carry.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import grpc
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from ray.serve.metrics import Gauge

from export import contract
from service.catalog import Catalog
from service.deployment.flags import shutdown_s
from service.deployment.gpus import replica_gpus
from service.deployment.ingress import CHECKED_EVERY_S, SILENT_FOR_S, WarmIngress
from service.deployment.lifeline import Lifeline
from service.deployment.ray_metrics import RayMetrics
from service.deployment.ray_private import REPLICAS, ByName, ReplicaNotFound, keep_calls_on_loopback
from service.deployment.scaling import ENCODER_TARGET, GATEWAY_TARGET, GENERATOR_TARGET, LOAD, autoscaling
from service.errors import CANNOT_START, NeverFits
from service.pools.catalog import GatewayCatalog
from service.pools.host import Host
from service.pools.limits import MESSAGE_BYTES
from service.pools.replicas import ReplicaLost
from service.runtime.budget import available_cpus, share_out
from service.settings import Settings, SettingsError, freeze, live, load
from service.telemetry.logs import to_file

APPLICATION = "attnserve"
_GATEWAY_CPUS = 1
_ROUTER = f"{ByName.__module__}.{ByName.__name__}"
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class HandlePool:
    """A `service.pools.replicas.Pool`: the replicas behind a Serve handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._deployment = handle.deployment_name
        self._unary: Any = handle.options(request_serialization="pickle", response_serialization="pickle")
        self._streaming: Any = self._unary.options(stream=True)

    def replicas(self) -> tuple[str, ...]:
        return REPLICAS.get(self._deployment, ())

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        response = self._unary.options(method_name=method, session_id=replica).remote(*arguments)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (ReplicaNotFound, RayActorError, grpc.aio.AioRpcError) as error:
            raise _said(error) from None

    async def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        response = self._streaming.options(method_name=method, session_id=replica).remote(*arguments)
        try:
            async for message in response:
                yield message
        except (ReplicaNotFound, RayActorError, grpc.aio.AioRpcError) as error:
            raise _said(error) from None
        finally:
            response.cancel()


def _said(error: ReplicaNotFound | RayActorError | grpc.aio.AioRpcError) -> Exception:
    """The failure of a call as an error of this service."""
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() in _LOST:
        return ReplicaLost("the replica that worked on the request is gone: send the request again")
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return NeverFits(f"the request or its answer has more than the {MESSAGE_BYTES} bytes of a message to a replica: send it in parts")
    return RuntimeError(f"a call to a replica failed: {error}")


@serve.deployment
class Replica(Host):
    """One process of a pool."""

    async def __init__(self, frozen: str, log_file: str | None) -> None:  # type: ignore[misc]
        settings = Settings.model_validate_json(frozen)
        to_file(Path(log_file) if log_file else None, settings.log_level)
        if log_file:
            keep_calls_on_loopback()
            Lifeline(Path(log_file).parent, serve.get_replica_context().deployment, os.getpid()).beat(asyncio.get_running_loop())
        super().__init__(Catalog(settings))
        try:
            await self.start()
        except Exception as error:  # only the message reaches the user who deploys
            raise RuntimeError(f"{CANNOT_START}: {error}") from error
        _export(self.catalog)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        self.catalog.reconfigure(user_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {LOAD: self.load()}

    async def __del__(self) -> None:
        await self.catalog.stop()


@serve.deployment
@serve.ingress()
class Gateway(WarmIngress):
    """One process that takes requests."""

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
                settings, encoders=HandlePool(encoders) if encoders else None, generators=HandlePool(generators) if generators else None
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
        """CPU time of this process since the last call, as a share of its reservation; 0 at the first call.

        Requests in flight would not do: there are many whenever a pool is slow or streams are long, and more gateways do not help then.
        """
        seen = time.monotonic(), time.process_time()
        (before, took_s), self._seen = self._seen or seen, seen
        return {LOAD: (seen[1] - took_s) / max(seen[0] - before, 1e-3) / _GATEWAY_CPUS}


def _export(catalog: Catalog) -> None:
    """Copy our metrics to Ray's exporter, unless it is off, as it is on one machine (`flags.prepare`)."""
    if os.environ.get("RAY_enable_metrics_collection") != "0":  # noqa: SIM112  Ray's own spelling
        RayMetrics(catalog.metrics.registry, Gauge).start()  # type: ignore[arg-type]  # Ray's annotation of `tag_keys` is that of one name


def application(args: dict[str, Any]) -> Any:
    """For `import_path` in Serve's configuration. Settings come from `args` and the sources of `settings.load`.

    Ray stores the arguments of deployments in the GCS and its Redis. API keys are left out: a gateway reads those of its own node. The
    path of a file of keys is stored, and a gateway reads that file on its node.
    """
    settings = load({**args, "profile": "split"})
    return build(settings.model_copy(update={"api_keys": ()}), None, own_keys=bool(settings.api_keys))


def with_keys(frozen: str) -> str:
    """The settings with the API keys of this process's environment. SettingsError if it has none: anybody could call this gateway."""
    keys = load({}).api_keys
    if not keys:
        raise SettingsError("the cluster's head has ATTNSERVE_API_KEYS and this node has not: give it to every node")
    return freeze(Settings.model_validate_json(frozen).model_copy(update={"api_keys": keys}))


def build(settings: Settings, log_file: Path | None, *, own_keys: bool = False) -> Any:
    """The Serve application, without a pool for which there is no bundle. `own_keys`: a gateway takes the API keys of its node."""
    path = log_file and str(log_file)
    kinds = {bundle: contract.read_manifest(bundle).kind for bundle in settings.bundles}
    computing = settings.model_copy(update={"threads": threads(settings), "aliases": {}, "api_keys": (), "api_keys_file": None})
    sizes: dict[contract.Pool, tuple[int, int | None, float]] = {
        "encoder": (settings.encoders, settings.max_encoders, ENCODER_TARGET),
        "generator": (settings.generators, settings.max_generators, GENERATOR_TARGET),
    }
    pools: dict[contract.Pool, Any] = dict.fromkeys(sizes)
    for pool, size in sizes.items():
        if own := {bundle: kind for bundle, kind in kinds.items() if contract.KINDS[kind].pool == pool}:
            options = _pool(settings, *size, replica_gpus(settings, own.values()))
            frozen = freeze(computing.model_copy(update={"bundles": tuple(own)}))
            pools[pool] = Replica.options(name=pool, **options).bind(frozen, path)  # type: ignore[attr-defined]
    options = {**_common(settings), **_replicas(settings.gateways, settings.max_gateways, GATEWAY_TARGET)}
    gateway = Gateway.options(name="gateway", ray_actor_options={"num_cpus": _GATEWAY_CPUS}, **options)  # type: ignore[attr-defined]
    return gateway.bind(freeze(settings), path, own_keys, *pools.values())


def threads(settings: Settings) -> int:
    """Runtime threads of one replica. Unset: the CPUs of this machine, divided within a pool. Both pools get all of them, so that a single
    request in one pool can use every CPU while the other pool is idle."""
    return settings.threads or max(share_out(available_cpus()).runtime_threads // max(settings.encoders, settings.generators), 1)


def cpus(settings: Settings) -> int:
    """CPUs that all replicas together reserve in Ray, at their largest numbers."""
    computing = max(settings.encoders, settings.max_encoders or 0) + max(settings.generators, settings.max_generators or 0)
    return max(settings.gateways, settings.max_gateways or 0) * _GATEWAY_CPUS + computing * threads(settings)


def _common(settings: Settings) -> dict[str, Any]:
    return {
        # Admission is ours, in tokens and slots, and a gateway tries a refused call on another replica: Serve must neither queue nor
        # refuse calls. Serve's choice of a replica, which this number is for, is not used.
        "max_ongoing_requests": 100_000,
        "user_config": live(settings),
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": shutdown_s(settings),
        "health_check_period_s": CHECKED_EVERY_S,
        "health_check_timeout_s": SILENT_FOR_S,
        "logging_config": {"encoding": "JSON", "enable_access_log": False, "log_level": "WARNING"},
    }


def _pool(settings: Settings, least: int, most: int | None, target: float, gpus: float) -> dict[str, Any]:
    return {
        **_common(settings),
        **_replicas(least, most, target),
        "ray_actor_options": {"num_cpus": threads(settings), "num_gpus": gpus},
        "request_router_config": {"request_router_class": _ROUTER},
    }


def _replicas(least: int, most: int | None, target: float) -> dict[str, Any]:
    """The number of replicas, or the autoscaling that determines it."""
    if most is None:
        return {"num_replicas": least}
    return {"autoscaling_config": autoscaling(least, most, target)}
