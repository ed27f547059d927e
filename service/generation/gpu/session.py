"""Runs a decoder on a GPU. The states stay in GPU memory; a step copies only tokens to the GPU and logits from it.

The code works with the device of any ONNX Runtime provider, so tests run all of it with the CPU as the device.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from export import contract
from service.generation.gpu.row_copies import RowCopies
from service.generation.session import Ids, Logits, OnnxStepSession, Step, StepSession, Tensor, beginning
from service.runtime.onnx import CUDA, DEVICES, SettingsConflict, open_graph, with_provider

_SETS = 4  # most copies of all slots' states at a time: two sets for the running sequences, and two sets for as many prompts in prefill


def open_steps(
    bundle: Path, manifest: contract.Manifest, *, threads: int, provider: str, slots: int, gpu_memory_gib: float | None
) -> StepSession[Any]:
    """Open the step graph. If no GPU can be used, `provider` "cuda" raises SettingsConflict, and "auto" uses the CPU. `gpu_memory_gib`
    limits the GPU memory of the model, including the states of `slots` sequences.
    """

    def opened(chosen: str) -> StepSession[Any]:
        if chosen == CUDA:
            return DeviceStepSession(bundle, manifest, gpu_memory_gib=left_of(gpu_memory_gib, manifest, slots))
        return OnnxStepSession(bundle, manifest, threads=threads)

    return with_provider(provider, manifest.name, opened)


def left_of(gpu_memory_gib: float | None, manifest: contract.Manifest, slots: int) -> float | None:
    """Return the GiB of GPU memory left for weights and computation, after the states of all slots. Raises SettingsConflict if none is
    left.
    """
    assert manifest.decoder is not None
    if gpu_memory_gib is None:
        return None
    states_gib = _SETS * slots * manifest.decoder.state_bytes / 2**30
    if states_gib >= gpu_memory_gib:
        raise SettingsConflict(
            f"gpu_memory_gib={gpu_memory_gib:g} is not enough for {manifest.name}: the states of slots={slots} sequences take up to "
            f"{states_gib:.3g} GiB, and its weights come on top. Set more of it, or fewer slots."
        )
    return gpu_memory_gib - states_gib


class DeviceStates:
    """The states of B sequences on the device: a tensor (B, ...) for each state tensor. Unused rows contain arbitrary numbers."""

    def __init__(self, decoder: contract.Decoder, rows: int, copies: RowCopies, device: str) -> None:
        import onnxruntime as ort

        self._decoder, self._copies = decoder, copies
        self._tensors = [
            ort.OrtValue.ortvalue_from_shape_and_type((rows, *state.shape), np.dtype(state.dtype).type, device, 0)
            for state in decoder.states
        ]
        self._row_bytes = [state.nbytes for state in beginning(decoder)]

    def put(self, row: int, states: Sequence[Tensor] | None) -> None:
        given = beginning(self._decoder) if states is None else [np.ascontiguousarray(state) for state in states]
        self._copies(given, self.addresses(row))

    def copy(self, row: int, source: "DeviceStates", of: int, position: int) -> None:
        self._copies(source.addresses(of), self.addresses(row))

    def read(self, row: int, position: int) -> list[Tensor]:
        states = beginning(self._decoder)
        self._copies(self.addresses(row), states)
        return states

    def reserve(self, position: int, rows: int) -> bool:
        return False

    def share(self, other: "DeviceStates") -> None:
        """Nothing is updated in place on a device."""

    def addresses(self, row: int) -> list[int]:
        """Return the device address of this row in each tensor."""
        return [tensor.data_ptr() + row * size for tensor, size in zip(self._tensors, self._row_bytes, strict=True)]


class DeviceStepSession:
    """A bundle's step graph on the device of `provider`.

    The number of rows of a step is rounded up to a power of two, so that few different shapes occur. The unused rows at the end are
    computed too, and their results are ignored.
    """

    def __init__(self, bundle: Path, manifest: contract.Manifest, *, gpu_memory_gib: float | None = None, provider: str = CUDA) -> None:
        """`gpu_memory_gib` limits the memory for weights and computation, without states. Raises SettingsConflict if the GPU cannot be
        used.
        """
        assert manifest.decoder is not None
        if manifest.decoder.window is not None:
            raise SettingsConflict(
                f"{manifest.name} attends to a window of {manifest.decoder.window} tokens, whose slots are updated in place on the CPU "
                "only. Set provider=cpu, or auto"
            )
        self.decoder = manifest.decoder
        self.vocab_size = manifest.limits.vocab_size
        self.fingerprint = manifest.fingerprint
        self.provider = provider
        self._device = DEVICES[provider]
        graph = bundle / manifest.graph.file
        self._session = open_graph(graph, threads=1, provider=provider, gpu_memory_gib=gpu_memory_gib, promised=manifest.graph)
        self._copies = RowCopies(self.decoder, provider)
        places = zip(self._session.get_inputs(), self._session.get_input_memory_infos(), strict=True)
        elsewhere = [node.name for node, place in places if node.name.startswith("state_") and place.name.lower() != self._device]
        if elsewhere:  # such a graph cannot be used, because the input would be copied from the device only once, when it is bound
            raise SettingsConflict(
                f"{graph}: {provider} has no kernel for what reads {', '.join(elsewhere)}, so its states cannot stay on the device: "
                "set provider=auto, which computes such a model on the CPU."
            )

    def states(self, rows: int) -> DeviceStates:
        try:
            return DeviceStates(self.decoder, rows, self._copies, self._device)
        except RuntimeError as error:
            needed = rows * self.decoder.state_bytes / 2**20
            why = f"the states of {rows} sequences, {needed:.3g} MiB, find no room on the device: {str(error).strip()}. Set fewer slots."
            raise SettingsConflict(why) from error

    def batch(self, rows: int) -> int:
        return 1 << max(rows - 1, 0).bit_length()

    def bind(self, *steps: Step) -> Callable[[], None]:
        calls = [call for step in steps for call in self._calls(step)]

        def made() -> None:
            for call in calls:
                call()

        return made

    def _calls(self, step: Step) -> list[Callable[[], None]]:
        """Return the calls of a step: that of the graph, and what the step makes then."""
        session, binding = self._session, self._session.io_binding()
        binding.bind_cpu_input(contract.LENGTHS, step.lengths)
        binding.bind_cpu_input(contract.WANTED, step.wanted)
        for state, before, after in zip(self.decoder.states, step.states.addresses(0), step.out.addresses(0), strict=True):
            shape, dtype = (len(step.tokens), *state.shape), np.dtype(state.dtype).type
            binding.bind_input(state.name, self._device, 0, dtype, shape, before)
            binding.bind_output(state.output, self._device, 0, dtype, shape, after)
        binding.bind_output(contract.STEP_LOGITS, "cpu", 0, np.float32, step.logits.shape, step.logits.ctypes.data)
        fed = {contract.TOKENS: step.tokens, **({contract.POSITIONS: step.positions} if self.decoder.takes_positions else {})}

        # The default argument keeps the arrays alive, because a binding holds no references to them.
        def call(_: object = step) -> None:
            for name, array in fed.items():
                binding.bind_cpu_input(name, array)  # copies the array to the device, unless the device is the CPU
            binding.synchronize_inputs()
            session.run_with_iobinding(binding)

        return [call] if step.then is None else [call, step.then(slice(0, len(step.tokens)))]

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: DeviceStates, out: DeviceStates) -> Logits:
        logits: Logits = np.empty((*wanted.shape, self.vocab_size), np.float32)
        self.bind(Step(tokens, lengths, positions, wanted, states, out, logits))()
        return logits
