"""Rotary settings that make no rotation; those that make one are held against transformers by test_decoder_families.py."""

import math
from typing import Any

import pytest

from models.parts.rotary import Rotary, RotaryScaling
from tests.cases import in_one_test

N_0 = 256
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@in_one_test(
    ("fields", "message"),
    [
        ({"kind": "longrope", "factor": 2.0}, "kind='longrope' of the rotary scaling is not one of linear, dynamic, llama3, yarn"),
        ({"kind": "linear", "factor": 0.5}, "factor=0.5 of the rotary scaling must be at least 1"),
        ({"kind": "linear", "factor": math.nan}, "factor=nan of the rotary scaling"),
        ({"kind": "yarn", "factor": 2.0, "original_positions": None}, "original_positions=None must be 1 or more for yarn"),
        ({"kind": "llama3", "factor": 2.0}, "low_freq_factor=None and high_freq_factor=None must be above 0"),
        ({"kind": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "low_freq_factor=1.0 and high_freq_factor=1.0"),
        ({"kind": "yarn", "factor": 2.0, "beta_fast": 1.0}, "beta_slow=1.0 and beta_fast=1.0"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryScaling(**{"original_positions": N_0} | fields)


def test_a_width_of_no_pairs_and_a_base_of_no_rotation_are_refused() -> None:
    with pytest.raises(ValueError, match=r"width=7, but a rotation needs pairs of columns"):
        Rotary(width=7)
    with pytest.raises(ValueError, match=r"base=1.0 of the rotation must be above 1"):
        Rotary(width=8, base=1.0)
