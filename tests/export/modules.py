"""A module of torch as a session of onnxruntime."""

from pathlib import Path

import onnxruntime as ort
import torch
from torch import Tensor, nn

from export.graphs.torch_graph import OPSET, quiet

SAME = 1e-4  # float32 on both sides, sums in another order


def opened(file: Path) -> ort.InferenceSession:
    return ort.InferenceSession(file, providers=["CPUExecutionProvider"])


def onnx_of(module: nn.Module, example: dict[str, Tensor], file: Path, *, most_tokens: int | None = None) -> ort.InferenceSession:
    """With the batch of every input free and, up to `most_tokens`, its second axis. Sizes of 1 would be taken for constants."""
    axes = {0: torch.export.Dim("B")} | ({} if most_tokens is None else {1: torch.export.Dim("N", max=most_tokens)})
    with quiet():
        torch.onnx.export(
            module,
            tuple(example.values()),
            file,
            dynamo=True,
            dynamic_shapes=(axes,) * len(example),
            input_names=list(example),
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    return opened(file)
