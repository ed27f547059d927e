"""Runs the two graphs of an encoder-decoder: the encoder computes memory and states, then each step computes the next logits of every
row. Also tests a bundle before it is served.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.runtime.onnx import one_runtime, open_graph, pad, stays_on_the_cpu

if TYPE_CHECKING:
    import onnxruntime as ort

Ids = NDArray[np.int64]
Tensors = dict[str, NDArray[np.float32]]


@dataclass
class Rows:
    """R rows between two steps: the mask (R, N), which is 0 for padding, the memory tensors (R, N, ..) and the states (R, ..). `memory` and
    `state` are keyed by the tensors' names in the graphs.
    """

    mask: Ids
    memory: Tensors
    state: Tensors


@dataclass(frozen=True)
class Step:
    """The result of one step: logits (R, V), attention weights (R, N), and the new states."""

    logits: NDArray[np.float32]
    attention: NDArray[np.float32]
    state: Tensors


class EncoderDecoderSession:
    """A bundle's graphs in ONNX Runtime, always on the CPU, whatever `provider` is. Call it from one thread only."""

    def __init__(self, bundle: Path, manifest: contract.Manifest, *, threads: int, provider: str = "auto") -> None:
        one_runtime()
        stays_on_the_cpu(manifest.name, provider)
        assert manifest.encoder_decoder is not None
        self.both = manifest.encoder_decoder
        self.vocab_size, self.max_source = manifest.limits.vocab_size, manifest.limits.max_tokens
        self._pad = manifest.pad_token_id

        def opened(graph: contract.Graph) -> "ort.InferenceSession":
            return open_graph(bundle / graph.file, threads=threads, promised=graph)

        self._reader, self._step = opened(self.both.reader), opened(manifest.graph)
        self._made = [tensor.name for tensor in self.both.reader.outputs]
        self._stepped = [tensor.name for tensor in manifest.graph.outputs]

    def read(self, sources: Sequence[list[int]]) -> Rows:
        """Encode the sources. Returns one row for each source, to which no output token has been fed."""
        ids, mask, _ = pad(sources, None, self._pad)
        made: dict[str, Any] = dict(
            zip(self._made, self._reader.run(self._made, {contract.INPUT_IDS: ids, contract.ATTENTION_MASK: mask}), strict=True)
        )
        memory = {name: value for name, value in made.items() if name.startswith("memory_")}
        return Rows(mask, memory, {name: value for name, value in made.items() if name not in memory})

    def step(self, previous: Ids, rows: Rows) -> Step:
        """Feed the previous token of each row, (R,), and return the logits that follow. `rows` is not changed."""
        feed = {contract.PREVIOUS: previous, contract.ATTENTION_MASK: rows.mask, **rows.memory, **rows.state}
        logits, attention, *states = self._step.run(self._stepped, feed)
        return Step(logits, attention, dict(zip(rows.state, states, strict=True)))


def check_golden(bundle: Path, session: EncoderDecoderSession, encode: Callable[[str], Sequence[int]]) -> None:
    """Test a bundle: encode its golden sources and decode their outputs. Raises BundleError if a logit differs by more than the bundle
    allows, or if the tokenizer's `encode` gives other tokens for a source."""
    golden = contract.read_golden(bundle, contract.EncoderDecoderGolden)
    for text, ids in zip(golden.texts, golden.token_ids, strict=True):
        if tuple(encode(text)) != ids:
            raise contract.BundleError(f"{bundle}: self-test failed, the tokenizer makes other tokens of {text!r:.80} than at export")
    used = [*golden.token_ids, *golden.outputs, *(ids for top in golden.top_token_ids for ids in top)]
    if (worst := max(map(max, used))) >= session.vocab_size:
        raise contract.BundleError(f"{bundle / contract.GOLDEN} has a token {worst}, and the model {session.vocab_size}")
    for ids, output, top, logits in zip(golden.token_ids, golden.outputs, golden.top_token_ids, golden.logits, strict=True):
        rows, previous = session.read([list(ids)]), session.both.begin_token_id
        for token, wanted_ids, wanted in zip(output, top, logits, strict=True):
            made = session.step(np.array([previous], np.int64), rows)
            rows.state, previous = made.state, token
            error = float(np.abs(made.logits[0, list(wanted_ids)] - np.array(wanted, np.float32)).max())
            if not error <= golden.max_abs_error:
                raise contract.BundleError(f"{bundle}: self-test failed, a logit is off by {error:.3g}, allowed {golden.max_abs_error:.3g}")
