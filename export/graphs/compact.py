"""What the compact forms of layers share: several linear layers as one product, and operators of ONNX Runtime."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

OPERATORS = "com.microsoft"  # the domain of onnxruntime's own operators
# Versions of ONNX's own operators that `one` computes.
STANDARD = {"ScatterND": 18, "GatherND": 13, "Reshape": 21, "RotaryEmbedding": 23, "ReduceSumSquare": 18, "CumSum": 14}


def joined(projections: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return one weight and bias for the concatenated outputs of linear layers. The bias is None if no layer has one."""
    weight = torch.cat([each.weight.detach() for each in projections])
    if all(each.bias is None for each in projections):
        return weight, None
    biases = [each.weight.new_zeros(each.out_features) if each.bias is None else each.bias.detach() for each in projections]
    return weight, torch.cat(biases)


def operator(name: str, inputs: Sequence[Tensor | None], shapes: Sequence[Sequence[Any]], **attributes: Any) -> tuple[Tensor, ...]:
    """Compute an operator of ONNX Runtime, in float32, with outputs of these shapes."""
    return tuple(
        torch.onnx.ops.symbolic_multi_out(
            f"{OPERATORS}::{name}", inputs, attrs=attributes, dtypes=(torch.float32,) * len(shapes), shapes=shapes, version=1
        )
    )


def one(name: str, inputs: Sequence[Tensor | None], shape: Any, **attributes: Any) -> Tensor:
    """Compute an operator of ONNX (in STANDARD) or of ONNX Runtime that has one output, of this shape and the dtype of the first input."""
    assert inputs[0] is not None
    domain, version = ("", STANDARD[name]) if name in STANDARD else (f"{OPERATORS}::", 1)
    return torch.onnx.ops.symbolic(f"{domain}{name}", inputs, attrs=attributes, dtype=inputs[0].dtype, shape=shape, version=version)


def rows_at(x: Tensor, places: Tensor) -> Tensor:
    """Return x[b, places[b]] for every row b, as a copy of whole rows: x (B, N, D), places (B, M) -> (B, M, D)."""
    return one("GatherND", [x, places.unsqueeze(-1)], (*places.shape, x.shape[2]), batch_dims=1)
