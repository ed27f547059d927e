"""How many replicas a deployment needs, by what they say of themselves. Serve's controller calls this, and applies bounds and delays.

Each replica says how much work it was asked for, as a share of what it can do (`service/runtime/offered.py`), refused work included.
The sum is the number of replicas that would be busy all the time; divided by the share of time that each should be, it is the number of
replicas to have. So the number does not depend on how many there are now, and one decision leads from any number to the right one.

A gateway says how much of a processor its process takes: it cannot say what it was not able to read. There, where all are at their limit,
each decision adds replicas in proportion until they are not.
"""

import math
from typing import Any

LOAD = "load"  # of one replica, since it was last asked
# What share of its time a replica should work. The rest is for bursts within the time that a new one takes to start. Slots are filled from
# a queue that waits a second at most, texts from one of milliseconds: a generator needs a little more of it. A gateway's tokenizers and
# its event loop share what Ray reserves for it, and the loop answers late from there on.
ENCODER_TARGET, GENERATOR_TARGET, GATEWAY_TARGET = 0.8, 0.75, 0.6
_SLACK = 0.05  # of the number of replicas: by so much may the work of each be over the target before there is another one


class ByLoad:
    """So many replicas that each has `target` of the load."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Serve's AutoscalingContext. Where no replica has said anything yet, the number stays."""
        loads, there = (context.aggregated_metrics or {}).get(LOAD), context.target_num_replicas
        if not loads:
            return there, {}
        wanted = sum(loads.values()) / self._target
        slack = _SLACK * there  # else the number would go back and forth where the work is just that of so many
        return there if there - 1 + slack < wanted <= there + slack else math.ceil(wanted), {}


def autoscaling(least: int, most: int, target: float) -> dict[str, Any]:
    """Serve's `autoscaling_config` of a deployment."""
    return {
        "min_replicas": least,
        "max_replicas": most,
        "upscale_delay_s": 5,
        "downscale_delay_s": 300,
        "look_back_period_s": 20,  # within which requests come evenly enough, and more than the 10 s between two reports of a replica
        "policy": {"policy_function": f"{ByLoad.__module__}:{ByLoad.__name__}", "policy_kwargs": {"target": target}},
    }
