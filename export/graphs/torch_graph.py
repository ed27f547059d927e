"""A torch module with named inputs and outputs, which can be run as a reference and exported to ONNX."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from export.checks.parity import Arrays, Feed, Tensors

OPSET = 20


@dataclass(frozen=True)
class TorchGraph:
    """A module that takes `inputs` in order and returns a tuple of `outputs`. Axes given by letters are dynamic."""

    module: nn.Module
    inputs: Tensors
    outputs: Tensors
    # dynamic axis -> its size in the traced example. It is at least 2, because the exporter makes an axis of size 1 a constant.
    sizes: dict[str, int]
    max_tokens: int | None = None  # largest N that the graph accepts; None: no limit
    opset: int = OPSET
    forms: dict[Any, Callable[..., Any]] = field(default_factory=dict)  # torch operator -> replacement for its ONNX form

    def answer(self, feed: Feed) -> Arrays:
        """Compute the outputs in torch. `feed` and the result are arrays by name."""
        with torch.inference_mode():
            values = self.module(*(torch.from_numpy(feed[tensor.name]) for tensor in self.inputs))
        return {tensor.name: value.numpy() for tensor, value in zip(self.outputs, values, strict=True)}

    def export(self, file: Path, *, weights_beside: bool) -> None:
        """Write the ONNX file, with its weights in a second file if `weights_beside`."""
        letters = {axis for tensor in self.inputs for axis in tensor.shape if isinstance(axis, str)}
        axes = {letter: torch.export.Dim(letter, max=self.max_tokens if letter == "N" else None) for letter in letters}
        shapes: list[Any] = [{i: axes[size] for i, size in enumerate(tensor.shape) if isinstance(size, str)} for tensor in self.inputs]
        named = [each for each in signature(self.module.forward).parameters.values() if each.kind is not Parameter.VAR_POSITIONAL]
        if len(named) < len(signature(self.module.forward).parameters):  # torch counts `*inputs` as one argument
            shapes[len(named) :] = [tuple(shapes[len(named) :])]
        with quiet():
            torch.onnx.export(
                self.module,
                tuple(self._example(tensor) for tensor in self.inputs),
                file,
                dynamo=True,
                dynamic_shapes=tuple(shapes),
                input_names=[tensor.name for tensor in self.inputs],
                output_names=[tensor.name for tensor in self.outputs],
                opset_version=self.opset,
                custom_translation_table=self.forms,
                external_data=weights_beside,
                verbose=False,
            )
        strip(file)

    def _example(self, tensor: Any) -> Tensor:
        shape = [self.sizes[size] if isinstance(size, str) else size for size in tensor.shape]
        return torch.ones(shape, dtype=getattr(torch, tensor.dtype))


def strip(file: Path) -> None:
    """Remove the exporter's metadata about source code, which contains paths of the exporting machine."""
    model = onnx.load(file, load_external_data=False)
    model.doc_string = ""
    del model.metadata_props[:]
    for part in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output, *model.graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    onnx.save(model, file)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide torch's warnings about its exporter and missing torchvision, because users cannot act on them."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
