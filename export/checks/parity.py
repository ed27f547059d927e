"""Does the graph say what torch says? Names, axes, shapes and types first, then values, one error each. No torch in here.

The reference is any function from named inputs to named outputs, so a test can give one of three lines.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export import contract
from export.errors import ExportError

Feed = dict[str, NDArray[np.int64]]
Arrays = Mapping[str, NDArray[np.float32]]
Reference = Callable[[Feed], Arrays]
Tensors = tuple[contract.Tensor, ...]

# The same sums in another order: float32 keeps 24 bits, and a dozen layers leave some of the last five in doubt.
# Relative to the largest value of an output where that is above 1, as in raw token vectors and logits.
FP32_TOLERANCE = 2e-5
LONGEST_COMPARED = 2048  # tokens; torch keeps all B * H * N² scores of a layer: 0.4 GB for two texts of this length and 12 heads


def open_graph(file: Path, *, threads: int = 0) -> ort.InferenceSession:
    """A session as the service opens it, on the CPU. `threads` 0: all cores."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def answers(session: ort.InferenceSession, outputs: Tensors) -> Reference:
    """The graph as a function from named inputs to named outputs."""
    names = [tensor.name for tensor in outputs]
    return lambda feed: dict(zip(names, session.run(names, feed), strict=True))


def check_interface(session: ort.InferenceSession, inputs: Tensors, outputs: Tensors) -> None:
    """Raises ExportError for the first tensor whose name, axes, sizes or type are not those of the contract."""
    for way, found, wanted in (("input", session.get_inputs(), inputs), ("output", session.get_outputs(), outputs)):
        names = [tensor.name for tensor in wanted]
        if [node.name for node in found] != names:
            raise ExportError(f"the graph's {way}s are {[node.name for node in found]}, and should be {names}")
    pairs = [*zip(session.get_inputs(), inputs, strict=True), *zip(session.get_outputs(), outputs, strict=True)]
    for node, tensor in pairs:
        if _axes(node.shape) != _axes(tensor.shape):
            raise ExportError(f"{tensor.name}: the axes are {_text(node.shape)}, and should be {_text(tensor.shape)} (letters are free)")
    for node, tensor in pairs:
        if tuple(node.shape) != tensor.shape:
            raise ExportError(f"{tensor.name}: the shape is {_text(node.shape)}, and should be {_text(tensor.shape)}")
    for node, tensor in pairs:
        dtype = {"tensor(int64)": "int64", "tensor(float)": "float32"}.get(node.type, node.type)
        if dtype != tensor.dtype:
            raise ExportError(f"{tensor.name}: the type is {dtype}, and should be {tensor.dtype}")


def compare(
    session: ort.InferenceSession, reference: Reference, outputs: Tensors, feeds: Sequence[Feed], *, tolerance: float = FP32_TOLERANCE
) -> float:
    """The largest |graph - reference| over all outputs and feeds. Raises ExportError for the first output beyond the tolerance."""
    largest = 0.0
    names = [tensor.name for tensor in outputs]
    for feed in feeds:
        wanted = reference(feed)
        B, N = feed[contract.ATTENTION_MASK].shape
        for name, got in zip(names, session.run(names, feed), strict=True):
            want = wanted[name]
            if got.shape != want.shape:
                raise ExportError(f"{name}: at B={B}, N={N} the graph gives the shape {got.shape}, and the model {want.shape}")
            error, allowed = difference(name, got, want, feed[contract.ATTENTION_MASK]), tolerance * scale(want)
            if not error <= allowed:  # not `>`: NaN must fail
                raise ExportError(f"{name}: at B={B}, N={N} the graph is {error:.3g} away from the model, and {allowed:.3g} is allowed")
            largest = max(largest, error)
    return largest


def difference(name: str, got: NDArray[np.float32], want: NDArray[np.float32], mask: NDArray[np.int64]) -> float:
    """The largest |got - want|. Logits of padding are nobody's business; token vectors there are 0, and compared."""
    apart = np.abs(got - want)
    return float((apart[mask != 0] if name == contract.LOGITS and apart.ndim == 3 else apart).max(initial=0.0))


def scale(values: NDArray[np.float32]) -> float:
    return max(1.0, float(np.abs(values).max(initial=0.0)))


def feeds(inputs: Tensors, *, vocab_size: int, pad_token_id: int, max_tokens: int) -> list[Feed]:
    """Random tokens at sizes that break careless graphs: one text, one token, odd sizes, lengths far apart, a text of none, full length."""
    random = np.random.default_rng(0)
    longest = min(max_tokens, LONGEST_COMPARED)
    sizes = [(1, 1), (1, 2), (2, 1), (1, 16), (2, 7), (3, 33), (5, 17), (8, 64), (2, longest)]
    return [
        _feed(random, inputs, lengths, vocab_size, pad_token_id)
        for lengths in (_lengths(B, min(N, longest)) for B, N in dict.fromkeys(sizes))
    ]


def _lengths(B: int, N: int) -> list[int]:
    """From N down to 1; a batch of five has a text without tokens."""
    lengths = [max(1, N * (B - i) // B) for i in range(B)]
    if B > 2:
        lengths[-1] = 0 if B == 5 else 1
    return lengths


def _feed(random: np.random.Generator, inputs: Tensors, lengths: list[int], vocab_size: int, pad_token_id: int) -> Feed:
    B, N = len(lengths), max(lengths)
    mask = (np.arange(N)[None, :] < np.array(lengths)[:, None]).astype(np.int64)
    feed = {
        contract.INPUT_IDS: np.where(mask != 0, random.integers(0, vocab_size, (B, N)), pad_token_id),
        contract.ATTENTION_MASK: mask,
        contract.TOKEN_TYPE_IDS: random.integers(0, 2, (B, N)) * mask,
    }
    return {tensor.name: feed[tensor.name] for tensor in inputs}


def _axes(shape: Sequence[str | int]) -> list[str]:
    return ["free" if isinstance(axis, str) else "fixed" for axis in shape]


def _text(shape: Sequence[str | int]) -> str:
    return f"({', '.join(map(str, shape))})"
