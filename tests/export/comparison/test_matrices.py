"""What effective matrices tell of the mechanisms whose answer is known."""

import pytest

from export.comparison import matrices

N, D, H = 33, 16, 2


@pytest.mark.parametrize(("name", "most"), [("linear", [4, 8]), ("softmax", [N, N]), ("causal_linear", [N, N])])
def test_a_rank_is_at_most_the_width_of_a_feature_map(name: str, most: list[int]) -> None:
    found = matrices.ranks(name, N, (4, 8), H)
    assert list(found) == [4, 8]
    assert all(1 <= rank <= limit + 1e-9 for rank, limit in zip(found.values(), most, strict=True))


def test_what_is_no_attention_has_no_rank() -> None:
    assert matrices.ranks("convolution", N, (4, 8), H) == {}


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
    assert matrices.layers_to_reach(name, N, D, H) == layers
