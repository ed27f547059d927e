"""One call of a decoder's step graph: tokens and states in, logits and new states out, without a copy of either."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.runtime import CPU, choose_provider, one_runtime

State = NDArray[Any]  # (B, ...) of one state tensor
Ids = NDArray[np.int64]
Logits = NDArray[np.float32]


class StepSession(Protocol):
    """What the engine needs of a runtime. Calls come from one thread."""

    decoder: contract.Decoder
    vocab_size: int

    def bind(
        self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: Sequence[State], out: Sequence[State], logits: Logits
    ) -> Callable[[], None]:
        """A call that feeds each row its first `lengths[b]` tokens: (B, N), (B,), (B,), (B, M), states (B, ...) -> logits (B, M, V).

        It reads and writes these arrays in place, as often as it is called: all are C-contiguous, and the new states go into `out`, which
        is other memory than `states`. `positions[b]` is how many tokens the row has had before.
        """
        ...

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: Sequence[State], out: Sequence[State]) -> Logits:
        """The same, once."""
        ...


def zeros(decoder: contract.Decoder, rows: int) -> list[State]:
    """The states of `rows` sequences that have not begun."""
    return [np.zeros((rows, *state.shape), state.dtype) for state in decoder.states]


class OnnxStepSession:
    """A bundle's step graph in ONNX Runtime, with every input and output bound to memory of the caller's."""

    def __init__(self, bundle: Path, manifest: contract.Manifest, *, threads: int, provider: str = "auto") -> None:
        import onnxruntime as ort

        one_runtime()
        assert manifest.decoder is not None
        self.decoder = manifest.decoder
        self.vocab_size = manifest.limits.vocab_size
        self.provider = choose_provider(provider, ort.get_available_providers())
        if self.provider != CPU:  # its states would have to live there
            raise contract.BundleError(f"{bundle}: decoders run on the CPU provider so far, not on {self.provider}: set provider=cpu")
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Steps follow each other closely, and between two of them the threads belong to HTTP.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        self._session = ort.InferenceSession(str(bundle / manifest.graph.file), options, providers=[self.provider])

    def bind(
        self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: Sequence[State], out: Sequence[State], logits: Logits
    ) -> Callable[[], None]:
        binding = self._session.io_binding()
        inputs: dict[str, State] = {contract.TOKENS: tokens, contract.LENGTHS: lengths, contract.WANTED: wanted}
        if self.decoder.takes_positions:
            inputs[contract.POSITIONS] = positions
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        outputs: dict[str, State] = {contract.STEP_LOGITS: logits}
        for state, before, after in zip(self.decoder.states, states, out, strict=True):
            binding.bind_cpu_input(state.name, before)
            outputs[state.output] = after
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        bound = (inputs, list(states), outputs)  # the binding itself keeps nothing alive

        def call(_: object = bound) -> None:
            self._session.run_with_iobinding(binding)

        return call

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: Sequence[State], out: Sequence[State]) -> Logits:
        logits: Logits = np.empty((*wanted.shape, self.vocab_size), np.float32)
        self.bind(tokens, lengths, positions, wanted, states, out, logits)()
        return logits
