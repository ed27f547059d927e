"""Computes the number of replicas of a deployment from the load that they report. Serve's controller calls this code, and applies bounds
and delays.

An encoder or generator reports the work requested of it, including rejected work, as a share of its capacity
(`service/runtime/offered.py`). The sum of these shares over all replicas, divided by the target utilisation, is the number of replicas that
are needed. The sum does not depend on the present number of replicas, so a single decision reaches the needed
number.

A gateway reports its CPU time as a share of its reservation, because it cannot report requests that it had no time to read. While all
gateways are saturated, each decision adds gateways in proportion to their present number.

Also computes the GPUs that replicas reserve in Ray, and checks that this machine has them.
"""

import itertools
import math
from collections.abc import Iterable
from typing import Any

from export import contract
from service.errors import StartFailed
from service.settings import Settings

LOAD = "load"  # name of the metric "load since the previous report", which replicas report
# Target utilisation of a replica; the rest is for bursts until a new replica has started. Generators need a larger reserve than encoders,
# because their requests wait up to a second for a slot, and requests of encoders only milliseconds. In a gateway, tokenizers and event
# loop share the reserved CPU, and above this utilisation the event loop answers late.
ENCODER_TARGET, GENERATOR_TARGET, GATEWAY_TARGET = 0.8, 0.75, 0.6
_SLACK = 0.05  # replicas are added if this share more than there are is needed, so that the number does not oscillate
_REPORT_S = 2  # seconds from one report of a replica to its next
_WINDOW_S = 12.0  # the load is the mean of so many seconds: with fewer, the number would follow the chance of arrivals


class ByLoad:
    """A Serve autoscaling policy that keeps the replicas' utilisation at `target`."""

    def __init__(self, target: float, keep_s: float = 300.0) -> None:
        """Replicas are removed when fewer have been needed for `keep_s` seconds."""
        self._target, self._keep_s = target, keep_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return (number of replicas, state for the next call) for Serve's AutoscalingContext. The number does not change until a replica
        has reported its load.

        The number never falls below the highest need of the last `keep_s` seconds. Serve's own `downscale_delay_s` would take the need of
        one moment at its end, and a pause at that moment would remove replicas that are needed again after it.
        """
        there, now = context.target_num_replicas, context.current_time
        load = fleet_load((context.raw_metrics or {}).get(LOAD, {}).values())
        if load is None:
            return there, {}
        wanted = load / self._target
        if wanted > (1 + _SLACK) * there:
            return math.ceil(wanted), {"needs": [(now, there)]}
        need = min(math.ceil(wanted), there)
        # Only needs that no later one exceeds, so there are never more of them than replicas. Without any, as after a restart of Serve's
        # controller, the present number counts as needed now.
        past = context.policy_state.get("needs") or [(now, there)]
        needs = [(at, most) for at, most in past if at > now - self._keep_s and most > need] + [(now, need)]
        return min(needs[0][1], there), {"needs": needs}


def fleet_load(reports: Iterable[list[Any]]) -> float | None:
    """Return the mean, over the last seconds that all replicas have reported, of the sum of their loads, or None without a report.

    `reports` has the samples of each replica, oldest first: `value` is the mean load from the sample before to `timestamp`. A replica that
    has just started counts from its first sample on. Means of each replica alone would count work twice after new replicas have taken it
    over from others, and lead to too many.
    """
    reports = [samples for samples in reports if samples]
    if not reports:
        return None
    latest = max(samples[-1].timestamp for samples in reports)
    # Until when all have reported. A replica that has been silent for longer than a window has no part in it.
    until = min(last for samples in reports if (last := samples[-1].timestamp) > latest - _WINDOW_S)
    since = until - _WINDOW_S
    work_s = 0.0
    for samples in reports:
        for before, sample in itertools.pairwise(samples):
            work_s += sample.value * max(min(sample.timestamp, until) - max(before.timestamp, since), 0.0)
    return work_s / _WINDOW_S


def autoscaling(least: int, most: int, target: float) -> dict[str, Any]:
    """Return Serve's `autoscaling_config` for a deployment of `least` to `most` replicas with the target utilisation `target`."""
    return {
        "min_replicas": least,
        "max_replicas": most,
        "upscale_delay_s": 5,
        "downscale_delay_s": 0,  # `ByLoad` has a delay of its own
        # Deprecated, but the variable that should replace it has no effect in Ray 2.60. Its default is 10 s.
        "metrics_interval_s": _REPORT_S,
        "look_back_period_s": 20,  # what a report covers: a window, and what another replica's report may be older
        "policy": {"policy_function": f"{ByLoad.__module__}:{ByLoad.__name__}", "policy_kwargs": {"target": target}},
    }


def replica_gpus(settings: Settings, kinds: Iterable[contract.Kind]) -> float:
    """Return the GPUs, or the fraction of a GPU, that one replica reserves. `kinds` are the kinds of its bundles."""
    if not any(contract.KINDS[kind].uses_gpu for kind in kinds):
        return 0.0
    return settings.replica_gpus if settings.replica_gpus is not None else float(settings.provider == "cuda")


def check_gpus(settings: Settings, there: int) -> None:
    """Raise StartFailed if the largest number of replicas that `settings` allows needs more GPUs than this machine has (`there`). Without
    this check, Ray would wait for another machine.
    """
    kinds = {contract.read_manifest(bundle).kind for bundle in settings.bundles}
    each = replica_gpus(settings, kinds)
    if not each:
        return
    pools = {
        name: settings.most(name) for name in sorted({f"{contract.KINDS[kind].pool}s" for kind in kinds if contract.KINDS[kind].uses_gpu})
    }
    replicas = sum(pools.values())
    needed = math.ceil(replicas / int(1 / each) if each < 1 else replicas * each)  # a replica cannot use parts of two GPUs
    if needed > there:
        asked = ", ".join(f"{name}={count}" for name, count in pools.items())
        raise StartFailed(
            f"{asked} and replica_gpus={each:g} need {needed} GPUs, but this machine has {there}. Check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES; or set fewer replicas, a smaller replica_gpus, or provider=cpu."
        )
