"""An encoder-decoder becomes two ONNX graphs: one reads a source once, one writes one token per call.

reader: input_ids (B, N), attention_mask (B, N) -> memory_* (B, N, ..), state_* (B, ..)
step:   previous (B,), attention_mask (B, N), memory_*, state_* -> logits (B, V), attention (B, N), new_state_*
B and N are dynamic, and a row's state has a constant size: rows at different steps, with sources of any length, can be batched.
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
    """The reader and the step of a model; with `for_onnx` as they are written, which torch itself cannot run."""
    with torch.inference_mode():
        source = torch.zeros(1, 2, dtype=torch.int64)
        memory, state = model.read(source, torch.ones_like(source, dtype=torch.bool))
    remembered = tuple(_float32(f"memory_{name}", "B", "N", *each.shape[2:]) for name, each in memory.items())
    states = tuple(_float32(f"state_{name}", "B", *each.shape[1:]) for name, each in state.items())
    new = (tensor.model_copy(update={"name": f"new_{tensor.name}"}) for tensor in states)
    reader_inputs = [contract.Tensor(name=name, dtype="int64", shape=("B", "N")) for name in (contract.INPUT_IDS, contract.ATTENTION_MASK)]
    previous = contract.Tensor(name=contract.PREVIOUS, dtype="int64", shape=("B",))
    written = _float32(contract.STEP_LOGITS, "B", model.config.vocab_size), _float32(contract.ATTENTION, "B", "N")
    if for_onnx and isinstance(model, RecurrentEncoderDecoder):
        model = with_children(model, forwards=OnnxGru(model.forwards), backwards=OnnxGru(model.backwards))
    step_inputs = (previous, reader_inputs[1], *remembered, *states)
    sizes, longest = {"B": 3, "N": 7}, int(model.config.max_source)
    return (
        TorchGraph(Reader(model).eval(), tuple(reader_inputs), (*remembered, *states), sizes, longest),
        TorchGraph(Step(model, list(memory), list(state)).eval(), step_inputs, (*written, *new), sizes, longest),
    )


class Reader(nn.Module):
    """`EncoderDecoder.read` with plain tensors."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        memory, state = self.model.read(input_ids, attention_mask != 0)
        return *memory.values(), *state.values()


class Step(nn.Module):
    """`EncoderDecoder.step` with plain tensors: those of the memory and then those of the state, in the order of their names."""

    def __init__(self, model: EncoderDecoder, memory: Sequence[str], state: Sequence[str]) -> None:
        super().__init__()
        self.model, self.memory, self.state = model, list(memory), list(state)

    def forward(self, previous: Tensor, attention_mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        memory = dict(zip(self.memory, tensors[: len(self.memory)], strict=True))
        state = dict(zip(self.state, tensors[len(self.memory) :], strict=True))
        logits, new, weights = self.model.step(previous, state, memory, attention_mask != 0)
        return logits, weights, *(new[name] for name in self.state)


class OnnxGru(nn.Module):
    """`torch.nn.GRU` of one layer and one direction as ONNX's operator: (B, N, D) -> (B, N, D_h).

    torch's exporter would make N a constant. ONNX has the gates in the order z, r, h, torch in the order r, z, h.
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


def _float32(name: str, *shape: str | int) -> contract.Tensor:
    return contract.Tensor(name=name, dtype="float32", shape=shape)
