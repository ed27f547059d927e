"""Mechanisms: their docstrings, the facts on their classes, and the names of causal twins."""

import inspect
import sys
from inspect import get_annotations

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.mechanism import ALL_PAIRS, Cost, Examples, Mechanism, Sizes
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


def planted(**facts: object) -> type[Mechanism]:
    def build(self: Mechanism, d_model: int, n_heads: int, *, block: int = 4) -> None:
        super(Mechanism, self).__init__()

    return type("Planted", (Mechanism,), {"capabilities": Capabilities(), "cost": ALL_PAIRS, "__init__": build} | facts)


LINEAR = Cost("O(N b D)", lambda N, s: N * s.block * s.D)


@in_one_test(
    ("facts", "named"),
    [
        ({"capabilities": Capabilities(pads_to="block")}, "examples.small['block'], which capabilities.pads_to names"),
        ({"examples": Examples({"width": 3})}, "__init__(width), which examples.small has"),
        ({"cost": LINEAR}, "examples.large['block'], which cost.work reads"),
        ({"cost": LINEAR, "examples": Examples(large={"block": 4})}, "capabilities.weights, which are not of all pairs"),
        ({"capabilities": Capabilities.of_recurrence(weights="pairs")}, "capabilities.weights, which are not of all pairs"),
    ],
)
def test_a_forgotten_fact_is_named_with_its_class(facts: dict[str, object], named: str) -> None:
    assert forgotten(planted()) == []
    assert forgotten(planted(**facts)) == [f"Planted.{named}"]


@in_one_test("fact", ["capabilities", "cost"])
def test_a_fact_without_a_default_is_named_with_its_class(fact: str) -> None:
    stated = {"capabilities": Capabilities(), "cost": ALL_PAIRS}
    del stated[fact]
    assert forgotten(type("Planted", (Mechanism,), stated)) == [f"Planted.{fact}"]


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
