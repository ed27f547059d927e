"""Compares the outputs of onnxruntime and torch for one layer, at sizes where incorrect graphs fail."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from export.checks.parity import open_graph
from export.comparison.plan import ComparisonPlan
from export.comparison.results import SizeParity

BAR = 1e-4  # largest allowed difference; both compute in float32 and sum in different orders


def differences(layer: Any, graph: Path, plan: ComparisonPlan) -> list[SizeParity]:
    """Return the differences at every size (B, N) of the plan, for random tokens of variance 1. The first row has N tokens, the second
    none, and half of the third is padding. Outputs at padding are not compared.
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
        found.append(SizeParity(B=B, N=N, max_abs_error=float(np.abs(got - y.numpy())[mask].max())))
    return found
