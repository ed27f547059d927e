"""onnxruntime computes GAU-α as torch does."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch

from export.graphs.torch_graph import OPSET, quiet
from tests.models.encoder.test_gau_alpha import ids, tiny

SAME = 1e-4  # float32 on both sides, sums in another order


@pytest.mark.exhaustive
def test_onnxruntime_equals_torch(tmp_path: Path) -> None:
    model, axes = tiny(torch.float32), {0: torch.export.Dim("B"), 1: torch.export.Dim("N", max=70)}
    example = ids(3, 7), torch.ones(3, 7, dtype=torch.int64)
    with quiet():
        torch.onnx.export(
            model,
            example,
            tmp_path / "model.onnx",
            dynamo=True,
            dynamic_shapes=(axes, axes),
            input_names=["ids", "mask"],
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for B, N in ((1, 1), (1, 2), (2, 33), (3, 70)):
        tokens, mask = ids(B, N), (torch.arange(N) < torch.tensor([N, (N + 1) // 2, 1])[:B, None]).long()
        with torch.no_grad():
            expected = model(tokens, mask)
        (y,) = session.run(None, {"ids": tokens.numpy(), "mask": mask.numpy()})
        assert np.abs(y - expected.numpy())[mask.numpy() == 1].max() <= SAME, (B, N)
