"""The environment variables for Ray and Serve, and why each is set. Every process of Ray reads them when it imports Ray's modules.
Therefore `prepare` must be called before ray is imported.
"""

import math
import os
import secrets
import sys
from pathlib import Path

from service.deployment.haproxy import KEEP_ALIVE_S
from service.pools.limits import MESSAGE_BYTES
from service.settings import Settings

STARTED_BEFOREHAND = 2  # workers to start in parallel: for Serve's controller and the first replica

# On a cluster, these variables must be in the environment of every node.
CLUSTER_FLAGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": 1,  # with this flag, calls between replicas are sent by value over gRPC, among other things
    "RAY_SERVE_ENABLE_HA_PROXY": 1,
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "service.deployment.replica.middlewares",
    "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).parent / "attnserve-haproxy"),
    # If a gateway dies before the first byte of its response, HAProxy sends the request to another gateway, provided that HAProxy has
    # the whole request (deploy/faults.md). Requests that may have effects are excluded by a rule in service/deployment/haproxy.py.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": MESSAGE_BYTES,
    # The next two variables end a replica soon after it fails its health checks. It cannot finish its requests, yet Serve would wait for
    # the end of its longest stream, and Ray would wait 5 s for its process to respond before killing it.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": 1,
    "RAY_kill_worker_timeout_milliseconds": 500,
    # The next two variables send replicas' logs to the node's stderr, which `kubectl logs` shows. Otherwise Ray would write them to files
    # that are lost with the pod, and Serve would repeat them at level INFO, which our log level drops.
    "RAY_LOG_TO_STDERR": 1,
    "RAY_SERVE_LOG_TO_STDERR": 1,
    # With 0, replicas report the load by which their pool is scaled. Otherwise replicas that started before autoscaling was configured
    # would not report it, and each gateway would report its number of requests in flight, which nothing uses.
    "RAY_SERVE_COLLECT_AUTOSCALING_METRICS_ON_HANDLE": 0,
    "RAY_USAGE_STATS_ENABLED": 0,
    "MALLOC_ARENA_MAX": 2,  # with fewer heaps, the threads of a process share them, which saves memory in each of Ray's processes
}


_SPARE_S = 30
_ELSEWHERE_S = 15  # seconds that a replica on another node needs to start, approximately


def shutdown_s(settings: Settings) -> int:
    """Return how many seconds Serve gives a replica on a cluster to finish its requests: longer than the longest request."""
    return math.ceil(settings.request_timeout_s) + _SPARE_S


def cluster_flags(settings: Settings) -> dict[str, object]:
    """Return CLUSTER_FLAGS and the flags that depend on the longest request."""
    return {
        **CLUSTER_FLAGS,
        # HAProxy is reloaded whenever gateways change. The old process still takes a request on each connection that is open, and ends with
        # the last connection, or this many seconds later.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": KEEP_ALIVE_S + shutdown_s(settings),
        # On SIGTERM, `ray start --block` drains its node for at most this long, while Serve starts replicas on other nodes. If other
        # nodes have no room, Serve stops this node's replicas `shutdown_s` seconds before the drain ends, as it does when it scales down.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": shutdown_s(settings) + _ELSEWHERE_S,
    }


def prepare(settings: Settings) -> None:
    """Set the flags that Ray reads at import, in the environment of this process and thus of every process that Ray starts."""
    flags = {
        **cluster_flags(settings),
        # Off, because requests bypass Ray (see `service/deployment/front.py`), so Ray needs no proxy and no port for them.
        "RAY_SERVE_ENABLE_HA_PROXY": 0,
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": 0,
        # The `attnserve` command drains replicas itself, so Ray need not wait.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": 0,
        # With few replicas, Serve's controller can check only five times a second, which saves CPU time. A start waits for two checks.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": 0.2,
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": 10_000,
        "RAY_enable_metrics_collection": 0,
        "RAY_enable_pipe_based_agent_to_parent_health_check": 1,  # see `without_agents` in service/deployment/ray_private.py
        # Ray would kill replicas when the machine's memory is 95 % full, even if another program uses it. The cgroup limits memory instead,
        # and a replica that the kernel kills is replaced.
        "RAY_memory_monitor_refresh_ms": 0,
        "RAY_worker_maximum_startup_concurrency": STARTED_BEFOREHAND,  # default: the number of cores
        "RAY_worker_niceness": 0,  # default: 15. The service must not yield to other processes, such as its client on this machine
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name in ("RAY_LOG_TO_STDERR", "RAY_SERVE_LOG_TO_STDERR"):  # the command's terminal shows the service's own log only
        del flags[name]
    os.environ.update({name: str(value) for name, value in flags.items()})
