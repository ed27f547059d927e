"""Mechanisms: their docstrings, the facts on their classes, and the names of causal twins."""

import inspect
import sys
from inspect import get_annotations

from models.attention.layers.mechanism import Mechanism, Sizes
from models.layers import LAYERS
from tests.cases import in_one_test


@in_one_test("name", LAYERS)
def test_a_layer_and_the_functions_of_its_file_are_documented(name: str) -> None:
    module = sys.modules[LAYERS[name].__module__]
    own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__ and callable(each)]
    assert LAYERS[name] in own
    assert [each.__name__ for each in (*own, module) if not each.__name__.startswith("_") and not each.__doc__] == []


# The facts on the classes


def forgotten(layer: type[Mechanism]) -> list[str]:
    """Facts that a class should state and does not, each with the name of the class."""
    missing = [fact for fact in get_annotations(Mechanism) if not hasattr(layer, fact)]
    if missing:
        return [f"{layer.__name__}.{fact}" for fact in missing]
    can, known = layer.capabilities, inspect.signature(layer).parameters
    if can.pads_to not in (None, "chunk" if can.causal else None, *layer.examples.small):
        missing.append(f"examples.small[{can.pads_to!r}], which capabilities.pads_to names")
    for kind in ("small", "large", "short"):
        missing += [f"__init__({option}), which examples.{kind} has" for option in getattr(layer.examples, kind).keys() - known.keys()]
    room = {"n_positions": 4096} if "n_positions" in known else {}
    sizes = Sizes(D=64, H=2, D_k=32, **{**layer.examples.large, **room})
    try:
        linear = layer.cost.work(2**20, sizes) < 3 * layer.cost.work(2**19, sizes)
    except AttributeError as error:
        return [f"{layer.__name__}.{fact}" for fact in (*missing, f"examples.large[{error.name!r}], which cost.work reads")]
    if can.weights == "pairs" and can.state in ("none", "constant") and (linear or can.causal):
        missing.append("capabilities.weights, which are not of all pairs")
    return [f"{layer.__name__}.{fact}" for fact in missing]


@in_one_test("name", LAYERS)
def test_no_fact_is_forgotten(name: str) -> None:
    assert forgotten(LAYERS[name]) == []


# Names


CAUSAL_TWINS = [name for name in LAYERS if name.startswith("causal_")]


@in_one_test("name", CAUSAL_TWINS)
def test_a_causal_twin_is_named_alike_and_stands_beside_its_other_form(name: str) -> None:
    """Its name, its class and its file, which is the file of the other form or next to it."""
    causal, other = LAYERS[name], LAYERS[name.removeprefix("causal_")]
    folder, _, file = other.__module__.rpartition(".")
    assert causal.__name__ == f"Causal{other.__name__}"
    assert causal.__module__ in (other.__module__, f"{folder}.causal_{file}")


def test_a_class_called_causal_is_a_twin() -> None:
    assert [name for name, layer in LAYERS.items() if layer.__name__.startswith("Causal")] == CAUSAL_TWINS
