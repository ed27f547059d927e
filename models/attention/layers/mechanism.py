"""The base of every layer in LAYERS: the facts of a mechanism, as data on its class.

The shared tests, the maps, the export and `attnserve compare` read them there, and nothing else lists mechanisms. Two facts every class or
its base must state, `capabilities` and `cost`; the others have a default that is true of most.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import nn

from models.attention.layers.capabilities import Capabilities


class Sizes(SimpleNamespace):
    """What a cost depends on beside N: D, H, D_k, and the options of the layer, as attributes."""


@dataclass(frozen=True)
class Row:
    """Of the complexity table: the name there, layers until every token has met every other, and the number of sequential operations."""

    name: str
    path: str
    sequential: str = "O(1)"


@dataclass(frozen=True)
class Cost:
    """The stated time of a layer.

    words: as stated, e.g. O(N² D); those of a row in the complexity table are the specification's (section 14), the others those of the
    layer's docstring. work: multiply-adds for N tokens as a function of (N, Sizes), projections left out.
    """

    words: str
    work: Callable[[int, Any], float]
    row: Row | None = None


ALL_PAIRS = Cost("O(N² D)", lambda N, s: 2 * N * N * s.D)  # q . k and the mean of the values, for every pair


def cost_of_state(words: str, D_phi: Callable[[Any], float], row: Row | None = None) -> Cost:
    """Write k vᵀ into S and read S with q: `D_phi(sizes)` times D_v numbers a head."""
    return Cost(words, lambda N, s: 2 * N * D_phi(s) * s.D, row)


@dataclass(frozen=True)
class Examples:
    """Keywords of the constructor with which a layer is tried out.

    small: in the shared tests, where the defaults would hide the mechanism at some 10 tokens. large: in the comparison, with every option
    that `cost` reads. short: what replaces these at 64 tokens. varied: the option that the cost depends on, and values to measure it at.
    """

    small: Mapping[str, Any] = field(default_factory=dict)
    large: Mapping[str, Any] = field(default_factory=dict)
    short: Mapping[str, Any] = field(default_factory=dict)
    varied: tuple[str, tuple[int, ...]] | None = None


class Mechanism(nn.Module):
    """Base of the layers. A subclass is built as Layer(d_model, n_heads, *, d_head=None, bias=.., ..)."""

    capabilities: Capabilities
    cost: Cost
    examples = Examples()
    # Where A v, the answers before norms and gates, is found: the dotted name of the part whose input it is, or the output of `recurrence`.
    answers: str = "to_out"
    gates: tuple[tuple[str, float], ...] = ()  # projections to gates, and the output of each that lets all through
    value_of_one: float = 1.0  # what `to_v` must give for a value of 1
    settles: tuple[str, ...] = ()  # state tensors that later tokens need not change, such as counts that end

    def begin(self) -> None:
        """Called after a model has drawn the weights of all linear maps: change those that begin otherwise."""

    def enlarge(self) -> None:
        """Draw parameters that begin near 0, and with them all answers, of size 1: for measurements on untrained layers."""
