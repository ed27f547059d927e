"""onnxruntime against torch, layer by layer, at sizes that break careless graphs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from export.checks.parity import open_graph
from export.comparison.plan import Plan
from export.comparison.results import Parity

BAR = 1e-4  # float32 on both sides, sums in another order


def differences(layer: Any, graph: Path, plan: Plan) -> list[Parity]:
    """At every size of the plan, with random tokens of variance 1: of B rows the first is full, the second empty, the third half padding.

    What stands at padding is not compared.
    """
    session = open_graph(graph)
    random = np.random.default_rng(0)
    found = []
    for B, N in plan.parity_sizes:
        x = random.standard_normal((B, N, plan.d_model), dtype=np.float32)
        mask = np.arange(N) < np.array([N, 0, (N + 1) // 2])[:B, None]
        with torch.inference_mode():
            expected = layer(torch.from_numpy(x), torch.from_numpy(mask))
        y = expected[0] if layer.capabilities.causal else expected
        (got,) = session.run(["y"], {"x": x, "mask": mask})
        found.append(Parity(B=B, N=N, max_abs_error=float(np.abs(got - y.numpy())[mask].max())))
    return found
