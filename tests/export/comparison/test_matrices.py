"""What effective matrices tell of the mechanisms whose answer is known."""

import pytest

from export.comparison import matrices
from export.comparison.plan import ComparisonPlan

PLAN = ComparisonPlan(d_model=16, n_heads=2, lengths=(64,), rank_length=33, rank_widths=(4, 8))


@pytest.mark.parametrize(("name", "widths"), [("linear", [4, 8]), ("softmax", [33, 33]), ("causal_linear", [33, 33])])
def test_numerical_ranks(name: str, widths: list[int]) -> None:
    """The width of the map; all; all."""
    found = matrices.ranks(name, PLAN)
    assert [rank.d_head for rank in found] == [4, 8]
    assert [rank.numerical for rank in found] == widths
    assert all(1 <= rank.effective <= rank.numerical + 1e-9 for rank in found)


def test_what_is_no_attention_has_no_rank() -> None:
    assert matrices.ranks("convolution", PLAN) == []


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("softmax", 1),
        ("causal_linear", 1),
        ("local", 8),  # 32 tokens to the other end, 4 a layer
        ("sliding_window", 8),
        ("atrous", 0),  # residue classes never meet
        ("sparse", 2),
        ("longformer", 2),  # by way of the global token
        ("flash", 1),
        ("convolution", 11),  # 3 a layer
        ("recurrent", 1),
    ],
)
def test_how_many_layers_it_takes_until_all_tokens_have_met(name: str, layers: int) -> None:
    assert matrices.layers_to_reach(name, PLAN) == layers
