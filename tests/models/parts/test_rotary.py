"""Rotary positions with every scaling, against the formulas of `transformers`."""

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.parts.positions import rotation_at
from models.parts.rotary import Rotary, RotaryScaling
from tests.cases import in_one_test

WIDTH, BASE, N_0 = 64, 10_000.0, 256
WITHIN = 1e-6  # theirs are float32, relative

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# id: (our fields, theirs where they are called otherwise)
SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"kind": "linear", "factor": 4.0}, {}),
    "dynamic": ({"kind": "dynamic", "factor": 3.0}, {}),
    "llama3": ({"kind": "llama3", **LLAMA3}, {}),
    "yarn": ({"kind": "yarn", "factor": 4.0}, {}),
    "yarn-options": ({"kind": "yarn", "factor": 7.0, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False}, {}),
}
every_scaling = in_one_test("case", SCALINGS)


def ours(case: str) -> Rotary:
    scaling = RotaryScaling(original_positions=N_0, **SCALINGS[case][0])
    return Rotary(width=WIDTH, base=BASE, scaling=scaling)


def theirs(case: str, *, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    kind, *_ = case.split("-")
    fields = {name: value for name, value in SCALINGS[case][0].items() if name != "kind"}
    fields |= {"original_max_position_embeddings": N_0} if kind in ("llama3", "yarn") else {}
    config = transformers.LlamaConfig(
        hidden_size=4 * WIDTH,
        num_attention_heads=4,
        max_position_embeddings=N_0,
        rope_parameters={"rope_type": kind, "rope_theta": BASE, **fields},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, seq_len=seq_len)


@every_scaling
def test_frequencies_and_factor_are_those_of_transformers(case: str) -> None:
    inv_freq, factor = theirs(case)
    rotary = ours(case)
    assert rotary.inv_freq.dtype == torch.float64
    assert ((rotary.inv_freq - inv_freq) / inv_freq).abs().max() <= WITHIN
    assert math.isclose(rotary.attention_factor, factor)


@every_scaling
def test_a_rotation_has_the_angles_and_the_factor(case: str) -> None:
    t = torch.tensor([[0, 1, 300], [5, 6, 7]])
    rotary = ours(case)
    rotation = rotary.at(t, dtype=torch.float64, lengths=torch.tensor([200, 200]))
    angles = (t[..., None] * rotary.inv_freq)[:, None]
    assert rotation.cos.shape == (2, 1, 3, WIDTH // 2)
    assert (rotation.cos - rotary.attention_factor * angles.cos()).abs().max() <= 1e-12
    assert (rotation.sin - rotary.attention_factor * angles.sin()).abs().max() <= 1e-12


def test_dynamic_scaling_goes_by_the_length_of_each_row() -> None:
    rotary, t = ours("dynamic"), torch.arange(3).expand(3, 3)
    lengths = (100, N_0, 1000)
    rotation = rotary.at(t, dtype=torch.float64, lengths=torch.tensor(lengths))
    for row, n in enumerate(lengths):
        inv_freq, _ = theirs("dynamic", seq_len=n)
        assert ((torch.atan2(rotation.sin, rotation.cos)[row, 0, 1] - inv_freq) / inv_freq).abs().max() <= WITHIN
    assert rotary.depends_on_length
    unsaid = rotary.at(torch.arange(998, 1001)[None], dtype=torch.float64)
    said = rotary.at(torch.arange(998, 1001)[None], dtype=torch.float64, lengths=torch.tensor([1001]))
    assert torch.equal(unsaid.cos, said.cos)


def test_without_scaling_it_is_the_plain_rotation() -> None:
    t = torch.tensor([[0, 3, 10_000_000]])
    rotary = Rotary(width=8, base=50.0)
    plain = rotation_at(t, 8, base=50.0, dtype=torch.float64)
    turned = rotary.at(t, dtype=torch.float64)
    assert torch.equal(turned.cos, plain.cos)
    assert torch.equal(turned.sin, plain.sin)
    assert (rotary.attention_factor, rotary.depends_on_length) == (1.0, False)


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
