"""Windowed graphs are compared with torch after states that a text made, at its beginning and when slots were overwritten."""

import numpy as np
import pytest

from export import contract
from export.checks.decoder_parity import Steps, changed_by_slots, compare
from export.checks.parity import Arrays, Feed
from export.errors import ExportError

SLOTS, VOCAB = 256, 5
INPUTS = contract.decoder_interface(
    (contract.StateTensor(name="state_0_k", shape=(1, SLOTS, 1), slots=True),), VOCAB, takes_positions=True
)[0]


def fed(feed: Feed, *, wraps: bool = True) -> Arrays:
    """Write 1 + the token to its slot. The logits of a row are the sum of its slots. Without `wraps`, nothing is written after the last."""
    k = feed["state_0_k"].copy()
    for row, (tokens, n, start) in enumerate(zip(feed["tokens"], feed["lengths"], feed["positions"], strict=True)):
        held = np.count_nonzero(k[row])
        assert held == min(start, SLOTS), f"a row at position {start} has {held} tokens in its slots, a state that no text makes"
        for at in range(n):
            if wraps or start + at < SLOTS:
                k[row, 0, (start + at) % SLOTS] = 1 + tokens[at]
    M = feed["wanted"].shape[1]
    sums = np.broadcast_to(k.sum((1, 2, 3))[:, None, None], (len(k), M, VOCAB))
    return {"logits": sums.astype(np.float32), "new_state_0_k": k}


def steps(*, wraps: bool = True) -> Steps:
    return Steps(lambda feed: fed(feed, wraps=wraps), INPUTS, n_slots=SLOTS)


def test_rows_begin_with_states_that_texts_make() -> None:
    assert compare(steps(), steps(), vocab_size=VOCAB) == 0


def test_a_graph_that_forgets_to_overwrite_slots_is_refused() -> None:
    with pytest.raises(ExportError, match=r"(logits|state_0_k): at B=2, N=1"):
        compare(steps(wraps=False), steps(), vocab_size=VOCAB)


@pytest.mark.parametrize("wrong", [None, 64, 192])
def test_a_graph_whose_bits_depend_on_the_number_of_slots_is_not_exact(wrong: int | None) -> None:
    """As onnxruntime's sums of 7 blocks. It counts only where all slots are in use, and only in a call with these slots."""

    def answer(feed: Feed) -> Arrays:
        found = fed(feed)
        k = found["new_state_0_k"]
        if k.shape[2] == wrong and np.count_nonzero(k) >= k.shape[2] - 1:
            found["logits"] = found["logits"] + np.float32(1)
        return found

    counts = contract.slot_counts(SLOTS)
    assert counts == (64, 128, 192, 256)
    changed = changed_by_slots(Steps(answer, INPUTS, n_slots=SLOTS), np.ones((1, SLOTS), np.int64), counts[:-1])
    assert changed == (wrong and f"having {wrong} slots changes logits at token {wrong - 2}")
