"""Computes the number of replicas of a deployment from the load that they report. Serve's controller calls this code, and applies bounds
and delays.

An encoder or generator reports the work requested of it, including rejected work, as a share of its capacity
(`service/runtime/offered.py`). The sum of these shares over all replicas, divided by the target utilisation, is the number of replicas that
are needed. The sum does not depend on the present number of replicas, so a single decision reaches the needed
number.

A gateway reports its CPU time as a share of its reservation, because it cannot report requests that it had no time to read. While all
gateways are saturated, each decision adds gateways in proportion to their present number.
"""

import math
from typing import Any

LOAD = "load"  # name of the metric "load since the previous report", which replicas report
# Target utilisation of a replica; the rest is for bursts until a new replica has started. Generators need a larger reserve than encoders,
# because their requests wait up to a second for a slot, and requests of encoders only milliseconds. In a gateway, tokenizers and event
# loop share the reserved CPU, and above this utilisation the event loop answers late.
ENCODER_TARGET, GENERATOR_TARGET, GATEWAY_TARGET = 0.8, 0.75, 0.6
_SLACK = 0.05  # the number does not change if the needed number differs from it by less than this share


class ByLoad:
    """A Serve autoscaling policy that keeps the replicas' utilisation at `target`."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return (number of replicas, {}) for Serve's AutoscalingContext. The number does not change until a replica has reported its
        load.
        """
        loads, there = (context.aggregated_metrics or {}).get(LOAD), context.target_num_replicas
        if not loads:
            return there, {}
        wanted = sum(loads.values()) / self._target
        slack = _SLACK * there  # prevents oscillation if the needed number is near an integer
        return there if there - 1 + slack < wanted <= there + slack else math.ceil(wanted), {}


def autoscaling(least: int, most: int, target: float) -> dict[str, Any]:
    """Return Serve's `autoscaling_config` for a deployment of `least` to `most` replicas with the target utilisation `target`."""
    return {
        "min_replicas": least,
        "max_replicas": most,
        "upscale_delay_s": 5,
        "downscale_delay_s": 300,
        "look_back_period_s": 20,  # covers two reports of each replica, which come every 10 s
        "policy": {"policy_function": f"{ByLoad.__module__}:{ByLoad.__name__}", "policy_kwargs": {"target": target}},
    }
