"""A decoder becomes one ONNX graph for prefill and decode: tokens and states in, logits and new states out.

Every row of a batch has its own state, length and position, so sequences of any age can be batched, and one call may decode a token of one
and prefill a chunk of another. B, N and M are dynamic and may be 1.
"""

from pathlib import Path

from torch import Tensor, nn

from export import contract
from export.graphs.decoder_operators import FORMS, with_operators
from export.graphs.torch_graph import TorchGraph
from models.decoder.model import Decoder

OPSET = 23  # the first with RMSNormalization as one operator


def states_of(decoder: Decoder) -> tuple[contract.StateTensor, ...]:
    """The state tensors of one sequence in the order of the graph: layer by layer, each layer's own order kept."""
    return tuple(
        contract.StateTensor(name=f"state_{number}_{name}", shape=tuple(state.shape[1:]))
        for number, states in enumerate(decoder.init_states(1))
        for name, state in states.items()
    )


class StepModule(nn.Module):
    """The decoder with its states as a flat list of tensors, as a graph has them."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.names = [list(states) for states in decoder.init_states(1)]  # of each layer

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The inputs of `step_graph` -> its outputs."""
        tokens, lengths, *rest = inputs
        positions = rest.pop(0) if self.decoder.takes_positions else None
        wanted = rest.pop(0)
        flat = iter(rest)
        states = [{name: next(flat) for name in names} for names in self.names]
        logits, new = self.decoder(tokens, lengths, states, positions, wanted)
        return logits.float(), *(state[name] for state, names in zip(new, self.names, strict=True) for name in names)


def step_graph(decoder: Decoder) -> TorchGraph:
    """The graph of a decoder. `trace` writes it."""
    shapes = {contract.TOKENS: ("B", "N"), contract.LENGTHS: ("B",), contract.POSITIONS: ("B",), contract.WANTED: ("B", "M")}
    if not decoder.takes_positions:
        del shapes[contract.POSITIONS]
    states = states_of(decoder)
    numbers = [contract.Tensor(name=name, dtype="int64", shape=shape) for name, shape in shapes.items()]
    before, after = (
        [contract.Tensor(name=name, dtype=state.dtype, shape=("B", *state.shape)) for name, state in zip(names, states, strict=True)]
        for names in ([state.name for state in states], [state.output for state in states])
    )
    logits = contract.Tensor(name=contract.STEP_LOGITS, dtype="float32", shape=("B", "M", decoder.config.vocab_size))
    sizes = {"B": 3, "N": 7, "M": 2}
    return TorchGraph(StepModule(decoder), (*numbers, *before), (logits, *after), sizes, opset=OPSET, forms=FORMS)


def trace(decoder: Decoder, file: Path) -> None:
    """Write the step graph of the decoder, which is left as it was, with its weights in a second file."""
    with with_operators(decoder):
        step_graph(decoder).export(file, weights_beside=True)
