"""How many replicas a pool needs, by what its replicas say of themselves. Serve's controller calls this, and applies bounds and delays."""

import math
from typing import Any

LOAD = "load"  # of one replica; see `service/pools/host.py`


class ByLoad:
    """So many replicas that each has `target` of the load: seconds of queued tokens for encoders, a share of the slots for generators."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Serve's AutoscalingContext. Where no replica has said anything yet, the number stays."""
        loads = (context.aggregated_metrics or {}).get(LOAD)
        if not loads:
            return context.target_num_replicas, {}
        return math.ceil(sum(loads.values()) / self._target), {}
