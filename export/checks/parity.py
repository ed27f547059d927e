"""Compares a graph with torch: first names, axes, shapes and types, then values. The reference is any function from named inputs to
outputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export import contract
from export.errors import ExportError

Feed = dict[str, NDArray[np.int64]]
Arrays = Mapping[str, NDArray[np.float32]]
Reference = Callable[[Feed], Arrays]
Tensors = tuple[contract.Tensor, ...]

# Limit of |graph - torch| / `scale`. onnxruntime and torch sum in different orders, so after 12 layers up to 5 of float32's 24 bits differ.
FP32_TOLERANCE = 2e-5
# Longest text in tokens that is compared. It is limited because torch stores all B * H * N² scores of a layer: 0.4 GB for B = 2, H = 12.
LONGEST_COMPARED = 2048
SHORT = 64  # tokens of the texts that `check_batches` runs in one batch


def open_graph(file: Path, *, threads: int = 0) -> ort.InferenceSession:
    """Open a graph on the CPU with the service's settings. `threads` = 0 uses all cores."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def answers(session: ort.InferenceSession, outputs: Tensors) -> Reference:
    """Return the graph as a function from named inputs to named outputs."""
    names = [tensor.name for tensor in outputs]
    return lambda feed: dict(zip(names, session.run(names, feed), strict=True))


def check_interface(session: ort.InferenceSession, inputs: Tensors, outputs: Tensors) -> None:
    """Raise ExportError for the first tensor whose name, axes, sizes or type differ from the contract."""
    for way, found, wanted in (("input", session.get_inputs(), inputs), ("output", session.get_outputs(), outputs)):
        names = [tensor.name for tensor in wanted]
        if [node.name for node in found] != names:
            raise ExportError(f"the graph's {way}s are {[node.name for node in found]}, but must be {names}")
    pairs = [*zip(session.get_inputs(), inputs, strict=True), *zip(session.get_outputs(), outputs, strict=True)]
    for node, tensor in pairs:
        if _axes(node.shape) != _axes(tensor.shape):
            raise ExportError(f"{tensor.name}: the axes are {_text(node.shape)}, but must be {_text(tensor.shape)} (letters are dynamic)")
    for node, tensor in pairs:
        if tuple(node.shape) != tensor.shape:
            raise ExportError(f"{tensor.name}: the shape is {_text(node.shape)}, but must be {_text(tensor.shape)}")
    for node, tensor in pairs:
        dtype = {"tensor(int64)": "int64", "tensor(float)": "float32"}.get(node.type, node.type)
        if dtype != tensor.dtype:
            raise ExportError(f"{tensor.name}: the type is {dtype}, but must be {tensor.dtype}")


def compare(
    session: ort.InferenceSession, reference: Reference, outputs: Tensors, feeds: Sequence[Feed], *, tolerance: float = FP32_TOLERANCE
) -> float:
    """Return the largest |graph - reference| over all outputs and feeds. Raises ExportError for the first output above the tolerance."""
    largest = 0.0
    answer = answers(session, outputs)
    for feed in feeds:
        mask = feed[contract.ATTENTION_MASK]
        where = f"at B={mask.shape[0]}, N={mask.shape[1]} the graph"
        wanted = reference(feed)
        for name, got in answer(feed).items():
            want = wanted[name]
            same_shape(got, want, f"{name}: {where}")
            if name == contract.LOGITS and want.ndim == 3:  # logits of padding are never read; token vectors of padding are 0
                got, want = got[mask != 0], want[mask != 0]
            largest = max(largest, largest_error(got, want, tolerance, f"{name}: {where} is"))
    return largest


def check_batches(session: ort.InferenceSession, feeds: Sequence[Feed], outputs: Sequence[str], pad_token_id: int) -> None:
    """Raise ExportError unless each of these outputs of a text has the same bits alone as in a batch. `feeds` are batches of one text."""
    short = [feed for feed in feeds if feed[contract.INPUT_IDS].size <= SHORT]
    longest = max(feeds, key=lambda feed: feed[contract.INPUT_IDS].size)
    for batch in (short, [feeds[0], longest]):
        N = max((feed[contract.INPUT_IDS].size for feed in batch), default=0)
        pads = {name: pad_token_id if name == contract.INPUT_IDS else 0 for name in longest}
        together = {
            name: np.concatenate([np.pad(feed[name], ((0, 0), (0, N - feed[name].size)), constant_values=pad) for feed in batch])
            for name, pad in pads.items()
            if batch
        }
        rows = session.run(outputs, together) if batch else []
        for at, feed in enumerate(batch):
            for name, alone, row in zip(outputs, session.run(outputs, feed), rows, strict=True):
                if not np.array_equal(alone[0], row[at] if name == contract.SPARSE else row[at, : alone.shape[1]]):
                    raise ExportError(f"{name} of a text of {feed[contract.INPUT_IDS].size} tokens changes with the batch; export in fp32")


def same_shape(got: NDArray[np.float32], want: NDArray[np.float32], what: str) -> None:
    if got.shape != want.shape:
        raise ExportError(f"{what} gives the shape {got.shape}, but the model {want.shape}")


def largest_error(got: NDArray[np.float32], want: NDArray[np.float32], tolerance: float, what: str, reference: str = "the model") -> float:
    """Return the largest |got - want|. Raises ExportError if it is above `tolerance * scale(want)`; `what` begins the message."""
    error, allowed = float(np.abs(got - want).max(initial=0.0)), tolerance * scale(want)
    if not error <= allowed:  # not written as `error > allowed`, which is false for NaN
        raise ExportError(f"{what} {error:.3g} away from {reference}; the limit is {allowed:.3g}")
    return error


def scale(values: NDArray[np.float32]) -> float:
    """Return max(1, the largest |value|), so that tolerances are relative for values above 1 and absolute below."""
    return max(1.0, float(np.abs(values).max(initial=0.0)))


def feeds(inputs: Tensors, *, vocab_size: int, pad_token_id: int, max_tokens: int, unattended: bool = False) -> list[Feed]:
    """Return random inputs, in sizes at which incorrect graphs fail: one text, one token, odd sizes, an empty text, full length.

    `unattended`: no token attends to the last third of every other text.
    """
    random = np.random.default_rng(0)
    longest = min(max_tokens, LONGEST_COMPARED)
    sizes = [(1, 1), (1, 2), (2, 1), (1, 16), (2, 7), (3, 33), (5, 17), (8, 64), (2, longest)]
    return [
        _feed(random, inputs, lengths, vocab_size, pad_token_id, unattended)
        for lengths in (_lengths(B, min(N, longest)) for B, N in dict.fromkeys(sizes))
    ]


def _lengths(B: int, N: int) -> list[int]:
    """Return B decreasing lengths that begin with N. In a batch of five, one text has no tokens."""
    lengths = [max(1, N * (B - i) // B) for i in range(B)]
    if B > 2:
        lengths[-1] = 0 if B == 5 else 1
    return lengths


def _feed(random: np.random.Generator, inputs: Tensors, lengths: list[int], vocab_size: int, pad_token_id: int, unattended: bool) -> Feed:
    B, N = len(lengths), max(lengths)
    mask = (np.arange(N)[None, :] < np.array(lengths)[:, None]).astype(np.int64)
    for row in range(0, B, 2) if unattended else ():
        mask[row, lengths[row] - lengths[row] // 3 : lengths[row]] = 2
    ids = np.where(mask != 0, random.integers(0, vocab_size, (B, N)), pad_token_id)
    return feed_of(inputs, ids, mask, random.integers(0, 2, (B, N)) * (mask != 0))


def feed_of(inputs: Iterable[Any], ids: NDArray[np.int64], mask: NDArray[np.int64], types: NDArray[np.int64]) -> Feed:
    """Return, by name, those of the arrays ids, mask and types, each (B, N), that the graph takes as `inputs`."""
    values = {contract.INPUT_IDS: ids, contract.ATTENTION_MASK: mask, contract.TOKEN_TYPE_IDS: types}
    return {each.name: values[each.name] for each in inputs}


def shapes_of(feeds: Sequence[Feed]) -> tuple[tuple[int, int], ...]:
    """Return (B, N) of each feed, for `contract.Parity.shapes`."""
    return tuple((int(B), int(N)) for B, N in (feed[contract.ATTENTION_MASK].shape for feed in feeds))


def _axes(shape: Sequence[str | int]) -> list[str]:
    return ["free" if isinstance(axis, str) else "fixed" for axis in shape]


def _text(shape: Sequence[str | int]) -> str:
    return f"({', '.join(map(str, shape))})"
