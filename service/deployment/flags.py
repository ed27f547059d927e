"""The flags of Ray and Serve, and why each is set. Ray reads them when its modules are imported, in every process, so they are set in the
environment before ray is imported: `prepare` must be called first."""

import math
import os
import secrets
import sys
from pathlib import Path

from service.pools.limits import MESSAGE_BYTES
from service.settings import Settings

STARTED_BEFOREHAND = 2  # workers, in parallel: for Serve's controller and the first replica

# Needed in the environment of every node of a cluster too.
CLUSTER_FLAGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": 1,  # among others, calls between replicas go by value over gRPC
    "RAY_SERVE_ENABLE_HA_PROXY": 1,
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "service.deployment.replica.middlewares",
    "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).parent / "attnserve-haproxy"),
    # If a gateway dies before the first byte of its answer, HAProxy sends the request to another one, provided that it has all of it
    # (deploy/faults.md). No route has side effects, so a request may be executed twice.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": MESSAGE_BYTES,
    # A replica that fails its checks cannot finish its requests, and Serve would wait for the longest stream. Ray would wait 5 s for an
    # answer of a process before killing it.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": 1,
    "RAY_kill_worker_timeout_milliseconds": 500,
    # With both, logs of replicas stay on the node's stderr, which `kubectl logs` shows. Ray would write them to files that end with the
    # pod, and Serve would repeat them at level INFO, which our level drops.
    "RAY_LOG_TO_STDERR": 1,
    "RAY_SERVE_LOG_TO_STDERR": 1,
    # Replicas report the load by which a pool is scaled. Otherwise replicas older than `autoscaling_config` would not report, and each
    # gateway would report requests in flight, which nothing reads.
    "RAY_SERVE_COLLECT_AUTOSCALING_METRICS_ON_HANDLE": 0,
    "RAY_USAGE_STATS_ENABLED": 0,
    "MALLOC_ARENA_MAX": 2,  # threads of a process share their heaps: less memory in each of Ray's processes
}


# Seconds for which Ray's HAProxy keeps an idle client connection (Serve's `keep_alive_timeout_s`). A HAProxy process that a reload has
# replaced still takes requests on its open connections.
KEEP_ALIVE_S = 90
_SPARE_S = 30
_ELSEWHERE_S = 15  # about as long as a replica needs to start


def shutdown_s(settings: Settings) -> int:
    """Seconds that Serve gives a replica of a cluster to finish its requests: longer than the longest request."""
    return math.ceil(settings.request_timeout_s) + _SPARE_S


def cluster_flags(settings: Settings) -> dict[str, object]:
    """CLUSTER_FLAGS, and those that follow from the longest request."""
    return {
        **CLUSTER_FLAGS,
        # HAProxy is reloaded at every change of gateways. The old process ends this many seconds later, with all its connections.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": KEEP_ALIVE_S + shutdown_s(settings),
        # On SIGTERM `ray start --block` drains its node for at most this many seconds. Serve starts replicas on other nodes. If these have
        # no room, Serve stops the node's replicas, as when it scales down, once `shutdown_s` is left.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": shutdown_s(settings) + _ELSEWHERE_S,
    }


def prepare(settings: Settings) -> None:
    """Set the flags that Ray reads at import, here and, through the environment, in every process it starts."""
    flags = {
        **cluster_flags(settings),
        # Requests bypass Ray (see `service/deployment/front.py`): it has no proxy and no port for them.
        "RAY_SERVE_ENABLE_HA_PROXY": 0,
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": 0,
        # The command itself drains replicas.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": 0,
        # There are few replicas: Serve's controller may check twice a second, which saves CPU time. A start takes several checks.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": 0.5,
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": 10_000,
        "RAY_enable_metrics_collection": 0,
        # Ray would kill replicas when the machine's memory is 95 % full, even because of another program. Memory is limited by the cgroup
        # instead, and a replica that the kernel kills is replaced.
        "RAY_memory_monitor_refresh_ms": 0,
        "RAY_worker_maximum_startup_concurrency": STARTED_BEFOREHAND,  # of as many as there are cores by default
        "RAY_worker_niceness": 0,  # 15 by default: the service must not yield to other processes, and its client may be on this machine
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name in ("RAY_LOG_TO_STDERR", "RAY_SERVE_LOG_TO_STDERR"):  # the terminal is the command's, which shows the service's own log
        del flags[name]
    os.environ.update({name: str(value) for name, value in flags.items()})
