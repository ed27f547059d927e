"""Batches: the last target, documents of one length, and texts that are too short."""

import numpy as np
import pytest

from models.training.text.packing import Packing

TOKENS = np.arange(1000, dtype=np.uint16)


def packing(seed: int = 0) -> Packing:
    return Packing(TOKENS, context=16, batch=5, seed=seed)


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
