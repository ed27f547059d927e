"""Exports a decoder as one ONNX graph for prefill and decode, from tokens and states to logits and new states. Every row of a batch has its
own state, length and position. B, N and M are dynamic and may be 1.
"""

from pathlib import Path

from torch import Tensor, nn

from export import contract
from export.graphs.decoder_operators import FORMS, with_operators
from export.graphs.torch_graph import TorchGraph
from models.decoder.model import Decoder

OPSET = 23  # the first ONNX opset with RMSNormalization


def states_of(decoder: Decoder) -> tuple[contract.StateTensor, ...]:
    """Return the state tensors of one sequence in the order of the graph's inputs, layer by layer."""
    return tuple(
        contract.StateTensor(
            name=f"state_{number}_{name}",
            shape=tuple(state.shape[1:]),
            holds=dict(block.layer.holds).get(name),
            slots=name in block.layer.slots,
        )
        for number, (block, states) in enumerate(zip(decoder.blocks, decoder.init_states(1), strict=True))
        for name, state in states.items()
    )


class StepModule(nn.Module):
    """A wrapper of the decoder that takes and returns the states as a flat list of tensors, because a graph has no dictionaries."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.names = [list(states) for states in decoder.init_states(1)]  # the names of the state tensors of each layer

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Map the inputs of `step_graph` to its outputs."""
        tokens, lengths, *rest = inputs
        positions = rest.pop(0) if self.decoder.takes_positions else None
        wanted = rest.pop(0)
        flat = iter(rest)
        states = [{name: next(flat) for name in names} for names in self.names]
        logits, new = self.decoder(tokens, lengths, states, positions, wanted)
        return logits.float(), *(state[name] for state, names in zip(new, self.names, strict=True) for name in names)


def step_graph(decoder: Decoder) -> TorchGraph:
    """Return the decoder as a graph that torch can run. `trace` writes it as ONNX."""
    interface = contract.decoder_interface(states_of(decoder), decoder.config.vocab_size, takes_positions=decoder.takes_positions)
    slots = {str(tensor.shape[2]): 2 * contract.SLOT_BLOCK for tensor in interface.inputs if contract.has_slots(tensor)}
    return TorchGraph(StepModule(decoder), *interface, {"B": 3, "N": 7, "M": 2} | slots, opset=OPSET, forms=FORMS)


def trace(decoder: Decoder, file: Path) -> None:
    """Write the decoder's step graph, with its weights in a second file. The decoder is unchanged."""
    with with_operators(decoder, whole_layers=True):
        step_graph(decoder).export(file, weights_beside=True)
