"""The table of mechanisms says what is there, all of it."""

import inspect
from collections import Counter
from pkgutil import resolve_name

import pytest

from models import LAYERS
from tests.models.mechanisms import MECHANISMS


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_mechanism_is_documented_and_takes_exactly_these_arguments(mechanism: str) -> None:
    """A wrapper counts as what it wraps, a class as its constructor."""
    row = MECHANISMS[mechanism]
    callable_ = resolve_name(row.callable)
    assert tuple(inspect.signature(callable_, follow_wrapped=True).parameters) == row.arguments
    assert callable_.__doc__


def test_every_layer_is_of_one_mechanism() -> None:
    assert Counter(name for row in MECHANISMS.values() for name in row.layers) == Counter(LAYERS.keys())


CAUSAL_TWINS = [name for name in LAYERS if name.startswith("causal_")]


@pytest.mark.parametrize("name", CAUSAL_TWINS)
def test_a_causal_twin_is_named_alike_and_stands_beside_its_other_form(name: str) -> None:
    """Its name, its class and its file."""
    causal, other = LAYERS[name], LAYERS[name.removeprefix("causal_")]
    folder, _, file = other.__module__.rpartition(".")
    assert causal.__name__ == f"Causal{other.__name__}"
    assert causal.__module__ == f"{folder}.causal_{file}"


def test_a_class_called_causal_is_a_twin() -> None:
    assert [name for name, layer in LAYERS.items() if layer.__name__.startswith("Causal")] == CAUSAL_TWINS
