"""Compares the two graphs of an encoder-decoder with torch, and the results of a row in a batch with those of the same row alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export import contract
from export.checks.parity import Feed, Reference, largest_error

# Largest allowed error, relative to the largest value of a tensor if that is above 1. Measured were 1e-6 to 1e-5, because onnxruntime and
# torch sum in different orders, and the differences add up over the steps of a source and an output.
TOLERANCE = 1e-4
STEPS = 8  # output tokens compared at each size


@dataclass(frozen=True)
class ReaderAndStep:
    """The two graphs of an encoder-decoder, or its torch model. Both are called with numpy arrays."""

    reader: Reference
    step: Reference
    begin_token_id: int

    def logits(self, ids: NDArray[np.int64], mask: NDArray[np.int64], outputs: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the logits (B, T, V) before each output token and the attention (B, T, N), for source ids (B, N) and outputs (B, T)."""
        known: dict[str, Any] = dict(self.reader({contract.INPUT_IDS: ids, contract.ATTENTION_MASK: mask}))
        previous, logits, attention = np.full(len(ids), self.begin_token_id), [], []
        for tokens in outputs.T:
            made = self.step({contract.PREVIOUS: previous, contract.ATTENTION_MASK: mask, **known})
            known |= {name.removeprefix("new_"): value for name, value in made.items() if name.startswith("new_")}
            logits.append(made[contract.STEP_LOGITS])
            attention.append(made[contract.ATTENTION])
            previous = np.ascontiguousarray(tokens)
        return np.stack(logits, axis=1), np.stack(attention, axis=1)

    def greedy(self, ids: list[int], *, end_token_id: int, max_output: int) -> tuple[list[int], NDArray[Any]]:
        """Return the greedy output tokens for one source, and the logits (T, V) before each of them."""
        source, written = np.array([ids], np.int64), list[int]()
        while True:
            logits, _ = self.logits(source, np.ones_like(source), np.array([[*written, 0]], np.int64))
            written.append(int(logits[0, -1].argmax()))
            if written[-1] == end_token_id or len(written) == max_output:
                return written, logits[0]


def compare_steps(
    graphs: ReaderAndStep, model: ReaderAndStep, feeds: Sequence[Feed], *, vocab_size: int, max_output: int
) -> tuple[float, float]:
    """Return the largest error of logits and attention over consecutive steps, and the lowest cosine between a step's two logit vectors.
    Raises ExportError for an error above the tolerance, also between a row alone and in a batch.
    """
    random, error, cosine = np.random.default_rng(0), 0.0, 1.0
    for feed in feeds:
        ids, mask = feed[contract.INPUT_IDS], feed[contract.ATTENTION_MASK]
        outputs = random.integers(0, vocab_size, (len(ids), min(STEPS, max_output)))
        got, want = graphs.logits(ids, mask, outputs), model.logits(ids, mask, outputs)
        where = f"at B={ids.shape[0]}, N={ids.shape[1]}"
        for name, ours, theirs in zip((contract.STEP_LOGITS, contract.ATTENTION), got, want, strict=True):
            error = max(error, largest_error(ours, theirs, TOLERANCE, f"{name}: {where} the steps are"))
        cosine = min(cosine, _cosine(got[0], want[0]))
        for row, length in enumerate(mask.sum(axis=1)):
            if length:
                alone = graphs.logits(ids[row : row + 1, :length], mask[row : row + 1, :length], outputs[row : row + 1])[0]
                what = f"logits: {where} row {row} alone is"
                largest_error(alone, got[0][row : row + 1], TOLERANCE, what, "itself in the batch")
    return error, cosine


def _cosine(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Return the lowest cosine, over all rows and steps, between the two logit vectors after subtracting each vector's mean."""
    one, other = (each - each.mean(axis=-1, keepdims=True) for each in (got, want))
    return float(((one * other).sum(-1) / (np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1))).min())
