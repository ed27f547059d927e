"""Windowed graphs are compared with torch after states that a text made, at its beginning and when slots were overwritten."""

import numpy as np
import pytest

from export import contract
from export.checks.decoder_parity import Steps, compare
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
