"""One call of ONNX Runtime: token ids of a batch in, named outputs out."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from export import contract

Array = NDArray[np.float32]


class SettingsConflict(ValueError):
    """The machine cannot do what the settings ask: the message says what to change."""


class Session(Protocol):
    """What the service needs of a runtime; `run` is called from several threads at once."""

    provider: str

    def run(self, outputs: Sequence[str], ids: Sequence[list[int]], type_ids: Sequence[list[int]] | None) -> dict[str, Array]:
        """B inputs of up to N tokens -> each named output, B rows in the order of the inputs; blocks until done."""
        ...


class OnnxSession:
    """A bundle's graph in ONNX Runtime.

    One session serves several callers: its pool of `threads` is shared, so a lone call spreads over all cores and concurrent calls take
    one each, without a second copy of the weights.
    """

    def __init__(self, bundle: Path, manifest: contract.Manifest, *, threads: int, provider: str = "auto") -> None:
        import onnxruntime as ort

        one_runtime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # A spinning thread takes the core that HTTP and tokenisation need: with them on the same cores it costs more than it saves.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        self.provider = choose_provider(provider, ort.get_available_providers())
        self._session = ort.InferenceSession(str(bundle / manifest.graph.file), options, providers=[self.provider])
        self._typed = any(tensor.name == contract.TOKEN_TYPE_IDS for tensor in manifest.graph.inputs)
        self._pad = manifest.pad_token_id

    def run(self, outputs: Sequence[str], ids: Sequence[list[int]], type_ids: Sequence[list[int]] | None) -> dict[str, Array]:
        input_ids, mask, types = pad(ids, type_ids, self._pad)
        feed = {contract.INPUT_IDS: input_ids, contract.ATTENTION_MASK: mask}
        if self._typed:
            feed[contract.TOKEN_TYPE_IDS] = types if types is not None else np.zeros_like(input_ids)
        return dict(zip(outputs, self._session.run(outputs, feed), strict=True))


def pad(
    ids: Sequence[list[int]], type_ids: Sequence[list[int]] | None, pad_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
    """Right-padded (B, N) ids, mask and types; N is the longest input."""
    longest = max(map(len, ids))
    if all(len(row) == longest for row in ids):
        input_ids = np.array(ids, np.int64)
        return input_ids, np.ones_like(input_ids), None if type_ids is None else np.array(type_ids, np.int64)
    input_ids = np.full((len(ids), longest), pad_id, np.int64)
    mask = np.zeros_like(input_ids)
    types = None if type_ids is None else np.zeros_like(input_ids)
    for row, tokens in enumerate(ids):
        input_ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        if types is not None and type_ids is not None:
            types[row, : len(tokens)] = type_ids[row]
    return input_ids, mask, types


def choose_provider(wanted: str, available: Sequence[str]) -> str:
    cuda = "CUDAExecutionProvider"
    if wanted == "cuda" and cuda not in available:
        raise SettingsConflict(
            f"provider=cuda, but this onnxruntime offers only {', '.join(available)}: install onnxruntime-gpu in its place"
        )
    return cuda if wanted == "cuda" or (wanted == "auto" and cuda in available) else "CPUExecutionProvider"


def one_runtime() -> None:
    """onnxruntime and onnxruntime-gpu own the same module: with both installed, which one runs is an accident of the order."""
    if _installed("onnxruntime") and _installed("onnxruntime-gpu"):
        raise SettingsConflict(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other. Keep one: "
            "`pip uninstall -y onnxruntime onnxruntime-gpu`, then `pip install onnxruntime` (CPU) or `pip install onnxruntime-gpu`."
        )


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
