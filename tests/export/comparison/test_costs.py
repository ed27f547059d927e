"""Nobody is left out: every layer has a stated cost, words of its own, and options that it takes."""

import inspect

import pytest

from export.comparison.costs import COSTS, TABLE, Sizes
from export.comparison.mechanisms import EVERYTHING, OPTIONS, SHORT_OPTIONS, WITH_A_LONGEST_N, chosen, words
from export.errors import ExportError
from models import LAYERS


def test_every_layer_has_a_cost_and_no_other_has() -> None:
    assert COSTS.keys() == EVERYTHING.keys()
    assert LAYERS.keys() < EVERYTHING.keys()


def test_every_row_of_the_complexity_table_names_a_mechanism() -> None:
    assert {row.mechanism for row in TABLE} <= EVERYTHING.keys()


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_cost_grows_with_the_length(name: str) -> None:
    options = OPTIONS.get(name, {}) | ({"n_positions": 8192} if name in WITH_A_LONGEST_N else {})
    work = [COSTS[name].work(N, Sizes(128, 2, options)) for N in (1024, 2048, 4096)]
    assert 0 < work[0] < work[1] < work[2] <= 4.01 * work[1]


@pytest.mark.parametrize("options", [OPTIONS, SHORT_OPTIONS], ids=["full", "short"])
def test_options_are_those_of_the_constructor(options: dict[str, dict[str, object]]) -> None:
    for name, given in options.items():
        assert given.keys() <= inspect.signature(EVERYTHING[name]).parameters.keys(), name


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_mechanism_says_what_it_computes_and_at_what_cost(name: str) -> None:
    told = words(name)
    assert told.title.endswith((".", ":", ","))
    assert "=" in told.body or "equation" in told.body.lower() or "softmax over" in told.body


def test_papers_are_those_of_the_docstrings() -> None:
    assert words("softmax").paper == "1706.03762"
    assert words("gated_delta").paper == "2412.06464"
    assert words("recurrent").paper == "1406.1078"


def test_mechanisms_are_chosen_by_name_in_their_order() -> None:
    assert chosen("linear, softmax") == ("softmax", "linear")
    assert chosen("") == tuple(EVERYTHING)
    with pytest.raises(ExportError, match="'hydra' is no mechanism; there are softmax, narrow"):
        chosen("linear,hydra")
