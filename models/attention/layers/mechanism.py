"""The base class of every layer in LAYERS. The facts about a mechanism are data on its class.

The shared tests, `models/maps/`, the export and `attnserve compare` read these facts, so that mechanisms are listed in LAYERS only.
Every class or its base must define `capabilities` and `cost`. The other facts have defaults that are right for most layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from torch import nn

from models.attention.layers.capabilities import Capabilities

# A condition that a state tensor satisfies after at least one token. sums: every number is above 0. sums_in_last_column: in the last column
# of each head, no number is below 0 and at least one is above 0. count: all numbers are integers from 1 to the number of tokens.
Holds = Literal["sums", "sums_in_last_column", "count"]


class Sizes(SimpleNamespace):
    """The sizes, other than N, that a cost depends on: they are attributes named D, H, D_k and like the options of the layer."""


@dataclass(frozen=True)
class ComplexityRow:
    """A row of the complexity table. `path`: number of layers until every token can influence every other. `sequential`: number of
    sequential operations."""

    name: str
    path: str
    sequential: str = "O(1)"


@dataclass(frozen=True)
class Cost:
    """The stated time complexity of a layer.

    words: the cost as text, e.g. O(N² D). It equals the cost in the layer's row of the complexity table (section 14 of the specification)
    or, for a layer without a row, in its docstring. work: a function of (N, Sizes) that returns the number of multiply-adds for N
    tokens, without projections.
    """

    words: str
    work: Callable[[int, Any], float]
    row: ComplexityRow | None = None


ALL_PAIRS = Cost("O(N² D)", lambda N, s: 2 * N * N * s.D)  # q . k and the weighted sum of values, for every pair


def cost_of_state(words: str, D_phi: Callable[[Any], float], row: ComplexityRow | None = None) -> Cost:
    """Return the cost of writing k vᵀ into S and reading S with q. S has `D_phi(sizes)` times D_v numbers a head."""
    return Cost(words, lambda N, s: 2 * N * D_phi(s) * s.D, row)


@dataclass(frozen=True)
class Examples:
    """Constructor options with which tests and measurements build a layer.

    small: options for the shared tests, whose texts of about 10 tokens are too short for the default options. large: options for the
    comparison, including every option that `cost` reads. short: options that replace those of `large` for about 64 tokens. varied: the name
    of an option that the cost depends on, and its values to measure.
    """

    small: Mapping[str, Any] = field(default_factory=dict)
    large: Mapping[str, Any] = field(default_factory=dict)
    short: Mapping[str, Any] = field(default_factory=dict)
    varied: tuple[str, tuple[int, ...]] | None = None


class Mechanism(nn.Module):
    """Base of the layers. A subclass has the constructor Layer(d_model, n_heads, *, d_head=None, bias=.., ..)."""

    capabilities: Capabilities
    cost: Cost
    examples = Examples()
    biased: bool = True  # whether the projections have biases if the option `bias` is None
    # Dotted name of the submodule whose input is A v, the heads' output before norms and gates. "recurrence": A v is the output of the
    # method `recurrence`.
    answers: str = "to_out"
    gates: tuple[tuple[str, float], ...] = ()  # name of each gate's projection, and the output of this projection at which the gate is 1
    value_of_one: float = 1.0  # the output of `to_v` for which the layer's value is 1
    holds: tuple[tuple[str, Holds], ...] = ()  # names of state tensors that a server can check, each with its condition
    settles: tuple[str, ...] = ()  # names of state tensors that stop changing after some tokens, such as a count with a maximum

    def begin(self) -> None:
        """Initialise the weights to which the model's general rule does not apply. The model calls this after initialising all linear
        maps."""

    def enlarge(self) -> None:
        """Redraw the parameters that are initialised near 0, with values of size 1. Measurements on untrained layers use this, because with
        parameters near 0 outputs would be near 0 too."""
