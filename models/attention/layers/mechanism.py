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
    """The sizes, other than N, that a cost depends on, as attributes: D, H, D_k, and the layer's options by their names."""


@dataclass(frozen=True)
class ComplexityRow:
    """A layer's row in the complexity table of docs/compare.md.

    name: the layer's name in the table. path: number of stacked layers after which every token can influence every other. sequential:
    number of operations that must be executed one after the other.
    """

    name: str
    path: str
    sequential: str = "O(1)"


@dataclass(frozen=True)
class Cost:
    """The stated time complexity of a layer.

    words: the cost as text, e.g. O(N² D). work: a function of (N, Sizes) that returns the number of multiply-adds for N tokens, without
    those of the projections. row: the layer's row in the complexity table, if it has one.
    """

    words: str
    work: Callable[[int, Any], float]
    row: ComplexityRow | None = None


ALL_PAIRS = Cost("O(N² D)", lambda N, s: 2 * N * N * s.D)  # q . k and the weighted sum of values, for every pair


def cost_of_state(words: str, D_phi: Callable[[Any], float], row: ComplexityRow | None = None) -> Cost:
    """Return the cost of a layer that, for each token, adds k vᵀ to a matrix S and multiplies S by q. S is (D_phi(sizes), D_v) a head."""
    return Cost(words, lambda N, s: 2 * N * D_phi(s) * s.D, row)


@dataclass(frozen=True)
class Examples:
    """Constructor options with which tests and measurements build a layer.

    small: options for the shared tests, whose texts of about 10 tokens are too short for the default options. large: options for the
    comparison in docs/compare.md, including every option that `cost` reads. short: options that replace those of `large` if a text has
    about 64 tokens. varied: the name of an option that the cost depends on, and the values at which it is measured.
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
    # Where `models/maps/` reads A v, the attention weights times the values, before norms and gates: the dotted name of the submodule whose
    # input is A v, or "recurrence" if A v is the output of the method `recurrence`.
    answers: str = "to_out"
    gates: tuple[tuple[str, float], ...] = ()  # name of each gate's projection, and the output of this projection at which the gate is 1
    value_of_one: float = 1.0  # the output of `to_v` for which the value v is 1; it differs from 1 if v is a function of this output
    holds: tuple[tuple[str, Holds], ...] = ()  # names of state tensors that a server can check, each with its condition
    shared: tuple[str, ...] = ()  # names of submodules that are one module for all layers of a model
    # Names of state tensors (H_k, S, D_k) with a slot for each token: token t is in slot t + 1, until no slot is left. A call writes only
    # the slots of its tokens, so the tensors can be updated in place, and cut to the slots in use.
    slots: tuple[str, ...] = ()
    settles: tuple[str, ...] = ()  # names of state tensors that stop changing after some tokens, such as a count with a maximum

    def begin(self) -> None:
        """Initialise the weights that need another rule than the model's linear maps. The model calls this after initialising those."""

    def enlarge(self) -> None:
        """Redraw the parameters that are initialised near 0, with values of about 1.

        Measurements on untrained layers call this, because with parameters near 0 the outputs would be near 0 too.
        """
