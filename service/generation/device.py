"""A decoder on a GPU: its states stay there, and only tokens go and logits come.

The code asks ONNX Runtime for "the device" of a provider and nothing else, so tests run all of it on the device that the CPU is.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from export import contract
from service.generation.row_copies import RowCopies
from service.generation.session import Ids, Logits, OnnxStepSession, StepSession, Tensor, beginning
from service.runtime.onnx import CUDA, DEVICES, SettingsConflict, open_graph, with_provider

_SETS = 4  # of states of all slots, at most: two of the running sequences, and two of as many prompts in prefill


def open_steps(
    bundle: Path, manifest: contract.Manifest, *, threads: int, provider: str, slots: int, gpu_memory_gib: float | None
) -> StepSession[Any]:
    """`provider` "cuda": on a GPU, or SettingsConflict; "auto": on a GPU where one can be had. The states of `slots` are within
    `gpu_memory_gib`."""

    def opened(chosen: str) -> StepSession[Any]:
        if chosen == CUDA:
            return DeviceStepSession(bundle, manifest, gpu_memory_gib=left_of(gpu_memory_gib, manifest, slots))
        return OnnxStepSession(bundle, manifest, threads=threads)

    return with_provider(provider, manifest.name, opened)


def left_of(gpu_memory_gib: float | None, manifest: contract.Manifest, slots: int) -> float | None:
    """What is left for weights and work once all slots have their states. SettingsConflict where that is nothing."""
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
    """A tensor (B, ...) on the device for each state tensor. Unused rows hold arbitrary numbers."""

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

    def copy(self, row: int, source: "DeviceStates", of: int) -> None:
        self._copies(source.addresses(of), self.addresses(row))

    def read(self, row: int) -> list[Tensor]:
        states = beginning(self._decoder)
        self._copies(self.addresses(row), states)
        return states

    def addresses(self, row: int) -> list[int]:
        """Of a row in each tensor."""
        return [tensor.data_ptr() + row * size for tensor, size in zip(self._tensors, self._row_bytes, strict=True)]


class DeviceStepSession:
    """A bundle's step graph on the device of `provider`.

    A step has 1, 2, 4, 8, .. rows, so that its shapes repeat: unused rows at the end are fed a token too.
    """

    def __init__(self, bundle: Path, manifest: contract.Manifest, *, gpu_memory_gib: float | None = None, provider: str = CUDA) -> None:
        """`gpu_memory_gib` bounds weights and work; states are beside it. SettingsConflict where the provider cannot be had."""
        assert manifest.decoder is not None
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
        if elsewhere:  # bound to a device's memory, it would be copied from there once, and never again
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

    def bind(
        self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: DeviceStates, out: DeviceStates, logits: Logits
    ) -> Callable[[], None]:
        session, binding = self._session, self._session.io_binding()
        binding.bind_cpu_input(contract.LENGTHS, lengths)
        binding.bind_cpu_input(contract.WANTED, wanted)
        for state, before, after in zip(self.decoder.states, states.addresses(0), out.addresses(0), strict=True):
            shape, dtype = (len(tokens), *state.shape), np.dtype(state.dtype).type
            binding.bind_input(state.name, self._device, 0, dtype, shape, before)
            binding.bind_output(state.output, self._device, 0, dtype, shape, after)
        binding.bind_output(contract.STEP_LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        fed = {contract.TOKENS: tokens, **({contract.POSITIONS: positions} if self.decoder.takes_positions else {})}

        def call(_: object = (states, out, logits)) -> None:  # a binding keeps no memory alive
            for name, array in fed.items():
                binding.bind_cpu_input(name, array)  # which is when it is copied to a device that is not the host
            binding.synchronize_inputs()
            session.run_with_iobinding(binding)

        return call

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: DeviceStates, out: DeviceStates) -> Logits:
        logits: Logits = np.empty((*wanted.shape, self.vocab_size), np.float32)
        self.bind(tokens, lengths, positions, wanted, states, out, logits)()
        return logits
