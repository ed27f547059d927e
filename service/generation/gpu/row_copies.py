"""Copies single rows of state tensors between host and device memory.

ONNX Runtime's Python API cannot copy a part of a tensor, but it can bind inputs and outputs to any address. So a graph with one Identity
node for each state tensor copies a row on the device, from the host or to the host: the source row is bound as input, the target row as
output. The graph's protobuf is encoded by hand, because the service does not depend on `onnx`.
"""

from collections.abc import Sequence

import numpy as np

from export import contract
from service.generation.session import Tensor
from service.runtime.onnx import DEVICES, open_graph

Place = Tensor | int  # one state tensor of one row: an array on the host, or an address on the device

_ELEMENT_TYPES = {"float32": 1, "int64": 7}  # onnx.TensorProto.DataType
_IR_VERSION, _OPSET = 8, 13


class RowCopies:
    """Copies rows of one decoder's states within the device of `provider`, or between it and the host."""

    def __init__(self, decoder: contract.Decoder, provider: str) -> None:
        self._states, self._device = decoder.states, DEVICES[provider]
        self._session = open_graph(identities(decoder), threads=1, provider=provider)

    def __call__(self, sources: Sequence[Place], targets: Sequence[Place]) -> None:
        """Copy each source into its target. Both are in the order of the decoder's states, and their arrays must be C-contiguous."""
        binding = self._session.io_binding()
        for state, source, target in zip(self._states, sources, targets, strict=True):
            dtype = np.dtype(state.dtype).type
            if isinstance(source, int):
                binding.bind_input(state.name, self._device, 0, dtype, state.shape, source)
            else:
                binding.bind_cpu_input(state.name, source)
            device, address = (self._device, target) if isinstance(target, int) else ("cpu", target.ctypes.data)
            binding.bind_output(state.output, device, 0, dtype, state.shape, address)
        binding.synchronize_inputs()
        self._session.run_with_iobinding(binding)


def identities(decoder: contract.Decoder) -> bytes:
    """Return an ONNX model with one Identity node for each state tensor, of any shape, as protobuf bytes."""
    graph = [_field(2, b"rows")]
    for state in decoder.states:
        graph.append(_field(1, _field(1, state.name.encode()) + _field(2, state.output.encode()) + _field(4, b"Identity")))
        element = _field(2, _field(1, _field(1, _ELEMENT_TYPES[state.dtype])))
        graph += _field(11, _field(1, state.name.encode()) + element), _field(12, _field(1, state.output.encode()) + element)
    return _field(1, _IR_VERSION) + _field(7, b"".join(graph)) + _field(8, _field(2, _OPSET))


def _field(number: int, value: int | bytes) -> bytes:
    """Encode one field of a protobuf message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)
