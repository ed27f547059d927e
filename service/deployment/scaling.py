"""The number of replicas of a deployment, from the load that they report. Serve's controller calls this, and applies bounds and delays.

An encoder or generator reports the work that it was asked for, refused work included, as a share of its capacity
(`service/runtime/offered.py`). The sum over all replicas, divided by the target utilisation, is the number needed. It does not depend on
the present number, so one decision suffices.

A gateway reports its CPU time as a share of its reservation, since it cannot report requests that it had no time to read. If all gateways
are saturated, each decision adds some in proportion until they are not.
"""

import math
from typing import Any

LOAD = "load"  # of one replica, since its last report
# Target utilisation of a replica. The rest is for bursts while a new replica starts. Requests queue for slots for up to a second, for
# encoders only for milliseconds, so generators need more reserve. In a gateway tokenizers and event loop share the reserved CPU, and above
# this share the loop answers late.
ENCODER_TARGET, GENERATOR_TARGET, GATEWAY_TARGET = 0.8, 0.75, 0.6
_SLACK = 0.05  # share of the present number by which the needed number may differ from it without a change


class ByLoad:
    """A Serve autoscaling policy: enough replicas for a utilisation of `target`."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Serve's AutoscalingContext. Until a replica has reported, the number stays."""
        loads, there = (context.aggregated_metrics or {}).get(LOAD), context.target_num_replicas
        if not loads:
            return there, {}
        wanted = sum(loads.values()) / self._target
        slack = _SLACK * there  # else the number would oscillate where the needed number is near a whole one
        return there if there - 1 + slack < wanted <= there + slack else math.ceil(wanted), {}


def autoscaling(least: int, most: int, target: float) -> dict[str, Any]:
    """Serve's `autoscaling_config` of a deployment."""
    return {
        "min_replicas": least,
        "max_replicas": most,
        "upscale_delay_s": 5,
        "downscale_delay_s": 300,
        "look_back_period_s": 20,  # two reports of each replica, which come every 10 s
        "policy": {"policy_function": f"{ByLoad.__module__}:{ByLoad.__name__}", "policy_kwargs": {"target": target}},
    }
