"""An encoder-decoder becomes two ONNX graphs: one that reads a source, once, and one that writes a token, again and again.

reader: input_ids (B, N), attention_mask (B, N) -> memory_* (B, N, ..), state_* (B, ..)
step:   previous (B,), attention_mask (B, N), memory_*, state_* -> logits (B, V), attention (B, N), new_state_*
B and N are free, and a row's state has a constant size: rows at different steps, of sources of any length, go together.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from export import contract
from export.graphs.encoder import OPSET, quiet, strip
from export.graphs.packed_encoder import with_children
from models.encoder_decoder.model import EncoderDecoder, Tensors
from models.encoder_decoder.recurrent import RecurrentEncoderDecoder

Interface = tuple[contract.Tensor, ...]


class ReaderGraph(nn.Module):
    """`EncoderDecoder.read` with plain tensors."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        memory, state = self.model.read(input_ids, attention_mask != 0)
        return *memory.values(), *state.values()


class StepGraph(nn.Module):
    """`EncoderDecoder.step` with plain tensors: those of the memory and then those of the state, in the order of their names."""

    def __init__(self, model: EncoderDecoder, memory: Sequence[str], state: Sequence[str]) -> None:
        super().__init__()
        self.model, self.memory, self.state = model, list(memory), list(state)

    def forward(self, previous: Tensor, attention_mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        memory = dict(zip(self.memory, tensors[: len(self.memory)], strict=True))
        state = dict(zip(self.state, tensors[len(self.memory) :], strict=True))
        logits, new, weights = self.model.step(previous, state, memory, attention_mask != 0)
        return logits, weights, *(new[name] for name in self.state)


class Graphs:
    """Both graphs of a model, with what goes in and out of them."""

    def __init__(self, model: EncoderDecoder) -> None:
        memory, state = _sample(model)
        self.reader = ReaderGraph(_for_onnx(model))
        self.step = StepGraph(model, list(memory), list(state))
        remembered = tuple(_tensor(f"memory_{name}", ("B", "N"), each, 2) for name, each in memory.items())
        states = tuple(_tensor(f"state_{name}", ("B",), each, 1) for name, each in state.items())
        mask = contract.Tensor(name=contract.ATTENTION_MASK, dtype="int64", shape=("B", "N"))
        self.reader_inputs: Interface = (contract.Tensor(name=contract.INPUT_IDS, dtype="int64", shape=("B", "N")), mask)
        self.reader_outputs: Interface = (*remembered, *states)
        self.step_inputs: Interface = (contract.Tensor(name=contract.PREVIOUS, dtype="int64", shape=("B",)), mask, *remembered, *states)
        self.step_outputs: Interface = (
            contract.Tensor(name=contract.STEP_LOGITS, dtype="float32", shape=("B", model.config.vocab_size)),
            contract.Tensor(name=contract.ATTENTION, dtype="float32", shape=("B", "N")),
            *(state.model_copy(update={"name": f"new_{state.name}"}) for state in states),
        )
        self.max_source = int(model.config.max_source)

    def trace(self, reader: Path, step: Path) -> None:
        """Write both."""
        _trace(self.reader, self.reader_inputs, self.reader_outputs, self.max_source, reader)
        _trace(self.step, self.step_inputs, self.step_outputs, self.max_source, step)


class OnnxGru(nn.Module):
    """`torch.nn.GRU` of one layer and one direction as ONNX's operator: (B, N, D) -> (B, N, D_h).

    torch's exporter would take N for a constant. ONNX has the gates in the order z, r, h, torch in the order r, z, h.
    """

    def __init__(self, gru: nn.GRU) -> None:
        super().__init__()
        W, R, b_W, b_R = (_zrh(gru.get_parameter(f"{name}_l0")) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        self.hidden_size = gru.hidden_size
        self.W, self.R, self.b = (nn.Parameter(each[None], requires_grad=False) for each in (W, R, torch.cat([b_W, b_R])))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        B, N, _ = x.shape
        h = torch.onnx.ops.symbolic(
            "GRU",
            [x.transpose(0, 1), self.W, self.R, self.b],
            attrs={"hidden_size": self.hidden_size, "linear_before_reset": 1},
            dtype=x.dtype,
            shape=(N, 1, B, self.hidden_size),
        )
        return h.squeeze(1).transpose(0, 1), None


def _zrh(gates: Tensor) -> Tensor:
    r, z, h = gates.detach().chunk(3)
    return torch.cat([z, r, h])


def _for_onnx(model: EncoderDecoder) -> EncoderDecoder:
    if not isinstance(model, RecurrentEncoderDecoder):
        return model
    return with_children(model, forwards=OnnxGru(model.forwards), backwards=OnnxGru(model.backwards))


def _sample(model: EncoderDecoder) -> tuple[Tensors, Tensors]:
    with torch.inference_mode():
        ids = torch.zeros(1, 2, dtype=torch.int64)
        memory, state = model.read(ids, torch.ones_like(ids, dtype=torch.bool))
    return memory, state


def _tensor(name: str, axes: tuple[str, ...], example: Tensor, n_free: int) -> contract.Tensor:
    return contract.Tensor(name=name, dtype="float32", shape=(*axes, *example.shape[n_free:]))


def _trace(module: nn.Module, inputs: Interface, outputs: Interface, max_source: int, file: Path) -> None:
    free = {"B": torch.export.Dim("B"), "N": torch.export.Dim("N", max=max_source)}
    sizes = {"B": 3, "N": 7}  # of the example; sizes of 1 would be taken for constants
    axes: list[Any] = [{i: free[size] for i, size in enumerate(tensor.shape) if isinstance(size, str)} for tensor in inputs]
    dynamic = tuple(axes) if isinstance(module, ReaderGraph) else (*axes[:2], tuple(axes[2:]))
    examples = tuple(
        torch.ones([sizes[size] if isinstance(size, str) else size for size in tensor.shape], dtype=getattr(torch, tensor.dtype))
        for tensor in inputs
    )
    with quiet():
        torch.onnx.export(
            module.eval(),
            examples,
            file,
            dynamo=True,
            dynamic_shapes=dynamic,
            input_names=[tensor.name for tensor in inputs],
            output_names=[tensor.name for tensor in outputs],
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    strip(file)
