"""Graphs whose inputs and outputs are at fixed addresses: of the host, or of a device, so that CUDA can record its kernels once and replay
them.

ONNX Runtime records a CUDA graph at the first run with a new number of the run option `gpu_graph_id`, and later runs with this number only
launch it. The code works with the device of any ONNX Runtime provider, so tests run it on a CPU.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnxruntime as ort

GRAPH_ID = "gpu_graph_id"
_ALIGNED = 256  # each input begins at a multiple of this number of bytes, as CUDA's own allocations do


def bind(session: "ort.InferenceSession", inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> Callable[[], None]:
    """Return a function that runs a session's graph, each time from what the inputs have then. The arrays are C-contiguous, and the outputs
    are written in place.
    """
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    # The default argument keeps the arrays alive, because a binding holds no references to them.
    def call(_: object = (inputs, outputs)) -> None:
        session.run_with_iobinding(binding)

    return call


class Field(NamedTuple):
    """The element type and shape of an input or output."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class BoundGraph:
    """A session's graph with fixed memory. The inputs of the host are in one block, so that one copy takes them to the device.

    Write into `arrays`, then call the object. Not thread-safe.
    """

    def __init__(
        self,
        session: "ort.InferenceSession",
        device: str,
        *,
        inputs: Mapping[str, Field],
        outputs: Mapping[str, Field],
        graph_id: int,
    ) -> None:
        """`graph_id` names the CUDA graph; it must differ from those of the session's other bound graphs."""
        import onnxruntime as ort

        self._session, self._device = session, device
        places, size = {}, 0
        for name, field in inputs.items():
            places[name] = size
            size += -(-field.nbytes // _ALIGNED) * _ALIGNED
        self._block = np.zeros(size, np.uint8)
        self.arrays: dict[str, NDArray[Any]] = {
            name: self._block[places[name] : places[name] + field.nbytes].view(field.dtype).reshape(field.shape)
            for name, field in inputs.items()
        }
        self._on_device = ort.OrtValue.ortvalue_from_shape_and_type((size,), np.uint8, device, 0)
        self._outputs = {
            name: ort.OrtValue.ortvalue_from_shape_and_type(field.shape, np.dtype(field.dtype).type, device, 0)
            for name, field in outputs.items()
        }
        block = self._on_device.data_ptr()
        self.addresses = {name: block + places[name] for name in inputs} | {name: self._outputs[name].data_ptr() for name in outputs}
        self._binding = session.io_binding()
        for name, field in inputs.items():
            self._binding.bind_input(name, device, 0, np.dtype(field.dtype).type, field.shape, self.addresses[name])
        for name, field in outputs.items():
            self._binding.bind_output(name, device, 0, np.dtype(field.dtype).type, field.shape, self.addresses[name])
        self._options = ort.RunOptions()
        if device != "cpu":
            self._options.add_run_config_entry(GRAPH_ID, str(graph_id))

    def __call__(self, wanted: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Copy the inputs to the device, run the graph, and return copies of the wanted outputs."""
        self._on_device.update_inplace(self._block)
        self._session.run_with_iobinding(self._binding, self._options)
        found = {name: self._outputs[name].numpy() for name in wanted}
        return {name: array.copy() for name, array in found.items()} if self._device == "cpu" else found  # on a CPU, `numpy` makes a view
