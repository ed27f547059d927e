"""Batches: every stretch once an epoch, in an order that only (seed, step) decides."""

import numpy as np
import pytest
import torch

from models.training.text.packing import Packing

TOKENS = np.arange(1000, dtype=np.uint16)


def packing(seed: int = 0) -> Packing:
    return Packing(TOKENS, context=16, batch=5, seed=seed)


def test_targets_are_one_token_further() -> None:
    tokens, targets = packing()(3)
    assert tokens.shape == targets.shape == (5, 16)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(targets, tokens + 1)


def test_an_epoch_sees_a_token_once_at_most_and_nearly_all() -> None:
    batches = packing()
    seen = torch.cat([batches(step)[0].flatten() for step in range(batches.steps_per_epoch)])
    assert len(seen.unique()) == len(seen)
    assert len(seen) > 1000 - 16 * (5 + 2)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    one, other = packing(), packing()
    forwards = [one(step) for step in range(30)]
    for step in reversed(range(30)):
        assert torch.equal(other(step)[0], forwards[step][0])
    assert not torch.equal(packing(seed=1)(0)[0], forwards[0][0])


def test_epochs_differ_in_order_and_in_where_they_cut() -> None:
    batches = packing()
    firsts = [set(batches(epoch * batches.steps_per_epoch)[0][:, 0].tolist()) for epoch in range(3)]
    assert firsts[0] != firsts[1] != firsts[2]
    assert len({min(start % 16 for start in starts) for starts in firsts}) > 1


def test_the_last_target_exists() -> None:
    """Whatever the length: 97 tokens fill 6 stretches of 16 with a target each only when the cutting begins at 0."""
    for length in range(81, 130):
        batches = Packing(TOKENS[:length], context=16, batch=2, seed=0)
        for step in range(10 * batches.steps_per_epoch):
            assert batches(step)[1].shape == (2, 16)


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="40 tokens do not fill a batch of 4 x 16"):
        Packing(TOKENS[:40], context=16, batch=4, seed=0)


def test_pictures_are_seen_whole_from_the_token_before_them() -> None:
    """Documents of 16 tokens: each sequence begins with the last token of the one before, and every document but the first is seen."""
    batches = Packing(TOKENS[: 16 * 11], context=16, batch=5, seed=0, document=16)
    assert batches.steps_per_epoch == 2
    starts = [start for step in range(2) for start in batches(step)[0][:, 0].tolist()]
    assert sorted(starts) == [16 * i - 1 for i in range(1, 11)]


def test_pictures_fit_the_context() -> None:
    with pytest.raises(ValueError, match="context=16 must be 18 tokens"):
        Packing(TOKENS, context=16, batch=5, seed=0, document=18)
