"""A decoder becomes one ONNX graph that is prefill and decode at once: tokens and states in, logits and new states out.

Every row of a batch brings its own state, its own length and its own position, so that sequences of any age go together, and one call may
hold a step of one and a piece of another's prompt. B, N and M are free, and 1 is as good as any other size.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from export import contract
from export.graphs.decoder_operators import FORMS, with_operators
from export.graphs.encoder import quiet, strip
from models.decoder.model import Decoder

OPSET = 23  # the first with RMSNormalization as one operator


def states_of(decoder: Decoder) -> tuple[contract.StateTensor, ...]:
    """The tensors that a sequence is remembered by, in the order of the graph. A layer's own order of names is kept."""
    return tuple(
        contract.StateTensor(name=f"state_{number}_{name}", shape=tuple(state.shape[1:]))
        for number, states in enumerate(decoder.init_states(1))
        for name, state in states.items()
    )


def inputs_of(decoder: Decoder) -> tuple[contract.Tensor, ...]:
    """What the graph reads."""
    shapes = {contract.TOKENS: ("B", "N"), contract.LENGTHS: ("B",), contract.POSITIONS: ("B",), contract.WANTED: ("B", "M")}
    if not decoder.takes_positions:
        del shapes[contract.POSITIONS]
    numbers = [contract.Tensor(name=name, dtype="int64", shape=shape) for name, shape in shapes.items()]
    return (*numbers, *(contract.Tensor(name=state.name, dtype=state.dtype, shape=("B", *state.shape)) for state in states_of(decoder)))


def outputs_of(decoder: Decoder) -> tuple[contract.Tensor, ...]:
    """What the graph gives."""
    logits = contract.Tensor(name=contract.STEP_LOGITS, dtype="float32", shape=("B", "M", decoder.config.vocab_size))
    states = (contract.Tensor(name=state.output, dtype=state.dtype, shape=("B", *state.shape)) for state in states_of(decoder))
    return (logits, *states)


class StepGraph(nn.Module):
    """The decoder with the tensors of its states one after the other, as a graph has them."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.names = [list(states) for states in decoder.init_states(1)]  # of each layer

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `inputs_of` -> those of `outputs_of`."""
        tokens, lengths, *rest = inputs
        positions = rest.pop(0) if self.decoder.takes_positions else None
        wanted = rest.pop(0)
        flat = iter(rest)
        states = [{name: next(flat) for name in names} for names in self.names]
        logits, new = self.decoder(tokens, lengths, states, positions, wanted)
        return logits.float(), *(state[name] for state, names in zip(new, self.names, strict=True) for name in names)


def trace(decoder: Decoder, file: Path) -> None:
    """Write the step graph of the decoder, which is left as it was, with its weights in a second file."""
    step = StepGraph(decoder)
    axes = {letter: torch.export.Dim(letter) for letter in "BNM"}
    inputs = inputs_of(decoder)
    with quiet(), with_operators(decoder):
        torch.onnx.export(
            step,
            tuple(_example(tensor) for tensor in inputs),
            file,
            dynamo=True,
            dynamic_shapes=(tuple({i: axes[size] for i, size in enumerate(tensor.shape) if isinstance(size, str)} for tensor in inputs),),
            input_names=[tensor.name for tensor in inputs],
            output_names=[tensor.name for tensor in outputs_of(decoder)],
            opset_version=OPSET,
            custom_translation_table=FORMS,
            external_data=True,
            verbose=False,
        )
    strip(file)


SIZES = {"B": 3, "N": 7, "M": 2}  # of the example; sizes of 1 would be taken for constants


def _example(tensor: contract.Tensor) -> Tensor:
    shape = [SIZES[size] if isinstance(size, str) else size for size in tensor.shape]
    return torch.ones(shape, dtype=getattr(torch, tensor.dtype))


def flat(states: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """The states of all layers in the order of the graph."""
    return [tensor for state in states for tensor in state.values()]
