"""What the manifest says of a graph for GPUs."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from export import contract
from export.graphs.onnx_file import describe
from export.graphs.torch_graph import TorchGraph

HOW = "weights in float16; no shape or work depends on data, so that CUDA can record it"


def gpu_description(
    file: Path, graph: TorchGraph, *, min_cosine: float, largest: float, pooling: contract.PoolingByWeights | None = None
) -> contract.GpuGraph:
    """Return the manifest's entry for the graph in `file`. The other arguments are the fields of `contract.GpuGraph`."""
    described = describe(file, graph.inputs, graph.outputs, HOW)
    return contract.GpuGraph(graph=described, pooling=pooling, min_cosine=min_cosine, largest=largest)


def largest_value(model: nn.Module, run: Callable[[], object]) -> float:
    """Return the largest absolute value that a module within `model` returns while `run` runs it."""
    largest = 0.0

    def look(module: nn.Module, arguments: object, output: object) -> None:
        nonlocal largest
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            largest = max(largest, float(output.abs().max()))

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    try:
        with torch.inference_mode():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return largest
