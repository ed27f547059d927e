"""Exports an encoder-decoder as two ONNX graphs: one reads a source once, the other generates one token per call.

reader: input_ids (B, N), attention_mask (B, N) -> memory_* (B, N, ..), state_* (B, ..)
step:   previous (B,), attention_mask (B, N), memory_*, state_* -> logits (B, V), attention (B, N), new_state_*
B and N are dynamic, and a row's state has a constant size. So rows at different steps, with sources of any length, can be batched.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from export import contract
from export.graphs.packed_encoder import with_children
from export.graphs.torch_graph import TorchGraph
from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.recurrent import RecurrentEncoderDecoder


def graphs_of(model: EncoderDecoder, *, for_onnx: bool = False) -> tuple[TorchGraph, TorchGraph]:
    """Return the reader and step graphs of a model. With `for_onnx` they contain ONNX operators that torch cannot run."""
    with torch.inference_mode():
        source = torch.zeros(1, 2, dtype=torch.int64)
        memory, state = model.read(source, torch.ones_like(source, dtype=torch.bool))
    remembered = (
        *(contract.float32(f"memory_{name}", "B", "N", *each.shape[2:]) for name, each in memory.items()),
        *(contract.float32(f"state_{name}", "B", *each.shape[1:]) for name, each in state.items()),
    )
    if for_onnx and isinstance(model, RecurrentEncoderDecoder):
        model = with_children(model, forwards=OnnxGru(model.forwards), backwards=OnnxGru(model.backwards))
    sizes, longest = {"B": 3, "N": 7}, int(model.config.max_source)
    step = contract.step_interface(remembered, model.config.vocab_size)
    return (
        TorchGraph(Reader(model).eval(), contract.SOURCE, remembered, sizes, longest),
        TorchGraph(EncoderDecoderStep(model, list(memory), list(state)).eval(), *step, sizes, longest),
    )


class Reader(nn.Module):
    """`EncoderDecoder.read`, with its results as a flat list of tensors: first the memory, then the state."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        memory, state = self.model.read(input_ids, attention_mask != 0)
        return *memory.values(), *state.values()


class EncoderDecoderStep(nn.Module):
    """`EncoderDecoder.step`, with a flat list of tensors: first the memory, then the state, both in the order of the reader's outputs."""

    def __init__(self, model: EncoderDecoder, memory: Sequence[str], state: Sequence[str]) -> None:
        super().__init__()
        self.model, self.memory, self.state = model, list(memory), list(state)

    def forward(self, previous: Tensor, attention_mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        memory = dict(zip(self.memory, tensors[: len(self.memory)], strict=True))
        state = dict(zip(self.state, tensors[len(self.memory) :], strict=True))
        logits, new, weights = self.model.step(previous, state, memory, attention_mask != 0)
        return logits, weights, *(new[name] for name in self.state)


class OnnxGru(nn.Module):
    """`torch.nn.GRU` with one layer and one direction as ONNX's operator, with gates z, r, h: (B, N, D) -> (B, N, D_h), for any N."""

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
