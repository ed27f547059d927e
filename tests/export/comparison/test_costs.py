"""Every layer is compared, with a stated cost."""

import pytest

from export.comparison.mechanisms import EVERYTHING, chosen, is_attention, work
from export.errors import ExportError
from models.layers import LAYERS
from tests.cases import in_one_test


def test_all_layers_are_compared() -> None:
    assert LAYERS.keys() < EVERYTHING.keys()
    assert [name for name in EVERYTHING if not is_attention(name)] == ["convolution", "recurrent"]


def test_the_complexity_table_has_every_row_of_the_specification() -> None:
    rows = [layer.cost.row.name for layer in EVERYTHING.values() if layer.cost.row and not layer.capabilities.causal]
    assert len(set(rows)) == len(rows) == 12


@in_one_test("name", EVERYTHING)
def test_a_cost_grows_with_the_length(name: str) -> None:
    found = [work(name, N, 128, 2, longest=8192) for N in (1024, 2048, 4096)]
    assert 0 < found[0] < found[1] < found[2] <= 4.01 * found[1]


def test_mechanisms_are_chosen_by_name_in_their_order() -> None:
    assert chosen("linear, softmax") == ("softmax", "linear")
    assert chosen("") == tuple(EVERYTHING)
    with pytest.raises(ExportError, match="'hydra' is not a mechanism; choose from softmax, narrow"):
        chosen("linear,hydra")
