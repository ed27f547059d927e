"""The flags of Ray and Serve, and why each is set. Ray reads them when its modules are imported, in every process, so they are set in the
environment before ray is imported: `prepare` must be called first."""

import math
import os
import secrets
import sys
from pathlib import Path

from service.pools.limits import MESSAGE_BYTES
from service.settings import Settings

STARTED_BEFOREHAND = 2  # workers, side by side: for Serve's controller and the first replica

# What profile `split` wants in the environment of every node of a cluster too.
CLUSTER_FLAGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": 1,  # among others, calls between replicas go by value over gRPC
    "RAY_SERVE_ENABLE_HA_PROXY": 1,
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "service.deployment.replica.middlewares",
    "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).parent / "attnserve-haproxy"),
    # A gateway that is gone before the first byte of its answer: HAProxy asks another, if it has all of the
    # request (deploy/faults.md). No route has effects, so twice is as good as once.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": MESSAGE_BYTES,
    # A replica that fails its checks cannot finish its requests; Serve would wait for the longest stream. And Ray would wait 5 s for an
    # answer of a process that it is about to kill.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": 1,
    "RAY_kill_worker_timeout_milliseconds": 500,
    # Ray writes what a replica says on stderr to a file of its session, and Serve makes INFO records of it, which our level drops: both
    # leave it on the node's own stderr, which is what `kubectl logs` shows. Log files of Ray's session would end with the pod.
    "RAY_LOG_TO_STDERR": 1,
    "RAY_SERVE_LOG_TO_STDERR": 1,
    # Replicas say what a pool is scaled by. Without this, those that were there before `autoscaling_config` was would say nothing, and each
    # gateway would report requests in flight that nothing here reads.
    "RAY_SERVE_COLLECT_AUTOSCALING_METRICS_ON_HANDLE": 0,
    "RAY_USAGE_STATS_ENABLED": 0,
    "MALLOC_ARENA_MAX": 2,  # threads of a process share their heaps: less memory in each of Ray's processes
}


# Ray's HAProxy keeps an idle connection of a client for so long (Serve's `keep_alive_timeout_s`). A process of HAProxy that a reload has
# replaced still takes requests that come on one.
KEEP_ALIVE_S = 90
_SPARE_S = 30
_ELSEWHERE_S = 15  # about as long as a replica needs to start


def shutdown_s(settings: Settings) -> int:
    """How long Serve lets a replica of a cluster finish what it has: no request is longer."""
    return math.ceil(settings.request_timeout_s) + _SPARE_S


def cluster_flags(settings: Settings) -> dict[str, object]:
    """CLUSTER_FLAGS, and those that follow from the longest request."""
    return {
        **CLUSTER_FLAGS,
        # HAProxy is reloaded at every change of gateways. The old process ends with all that it carries so long afterwards.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": KEEP_ALIVE_S + shutdown_s(settings),
        # On SIGTERM `ray start --block` drains its node for at most so long. Serve starts replicas on other nodes; where there is no room
        # it stops those of the node, as at a scale down, when no more than `shutdown_s` is left.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": shutdown_s(settings) + _ELSEWHERE_S,
    }


def prepare(settings: Settings) -> None:
    """Set the flags that Ray reads at import, here and, through the environment, in every process it starts."""
    flags = {
        **cluster_flags(settings),
        # Requests bypass Ray (see `service/deployment/front.py`): it has no proxy and no port for them.
        "RAY_SERVE_ENABLE_HA_PROXY": 0,
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": 0,
        # The command itself asks replicas to finish what they have.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": 0,
        # Ray looks after few replicas: twice a second will do, and its controller rests. A start waits for several turns.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": 0.5,
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": 10_000,
        "RAY_enable_metrics_collection": 0,
        # Ray would kill replicas when the machine's memory is 95 % full, even if another program filled it. The limit of this service is
        # that of its cgroup, and a replica that the kernel kills is replaced.
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
