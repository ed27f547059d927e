"""What is stated of each mechanism's time: the words, and the multiply-adds behind them as a function of N.

The words of the complexity table are those of the specification (section 14), all others those of the layers' docstrings. With the
function, a statement such as N (k + N / k) D has an exponent over given lengths, and the projections, which every layer has and no
statement counts, can be added to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import log2
from typing import Any


class Kind(StrEnum):
    """How a mechanism goes about the pairs of tokens: the panels of the plots."""

    pairs = "all pairs of tokens"
    pattern = "a pattern or a hash chooses pairs"
    sums = "sums over tokens, no pairs"
    causal_pairs = "causal, with a cache"
    causal_sums = "causal, with a state of bounded size"
    other = "no attention"


@dataclass(frozen=True)
class Sizes:
    """Of a layer, and the options it was built with."""

    D: int
    H: int
    options: Mapping[str, Any]

    @property
    def D_k(self) -> int:
        return self.D // self.H


@dataclass(frozen=True)
class Cost:
    """words: as stated; e.g. O(N² D). work: its multiply-adds for N tokens, projections left out."""

    kind: Kind
    words: str
    work: Callable[[int, Sizes], float]


def _pairs(kind: Kind = Kind.pairs) -> Cost:
    """q . k and the mean of the values, for every pair."""
    return Cost(kind, "O(N² D)", lambda N, s: 2 * N * N * s.D)


def _recurrence(words: str, D_phi: Callable[[Sizes], float]) -> Cost:
    """Write k vᵀ into S and read S with q, D_φ D_v numbers a head."""
    return Cost(Kind.causal_sums, words, lambda N, s: 2 * N * D_phi(s) * s.D)


def _gated(kind: Kind) -> Cost:
    return Cost(kind, "O(N² (s + e))", lambda N, s: N * N * (s.D_k + 2 * s.D))


def _flash(kind: Kind) -> Cost:
    """G pairs a token, and two products with a sum of s e numbers."""

    def work(N: int, s: Sizes) -> float:
        G: int = s.options["group"]
        e = 2 * s.D
        return N * G * (s.D_k + e) + 2 * N * s.D_k * e

    return Cost(kind, "O(N G D + N D s)", work)


def _lsh(N: int, s: Sizes) -> float:
    R: int = s.options["n_rounds"]
    C: int = s.options["chunk"]
    return 2 * R * N * 2 * C * s.D + R * N * s.H * log2(max(2, N))


def _nystrom(N: int, s: Sizes) -> float:
    m: int = s.options["n_landmarks"]
    conv_kernel: int = s.options["conv_kernel"]
    return 4 * N * m * s.D + s.H * 6 * 4 * m**3 + N * conv_kernel * s.D


COSTS: dict[str, Cost] = {
    "softmax": _pairs(),
    "narrow": _pairs(),
    "wide": Cost(Kind.pairs, "O(N² H D)", lambda N, s: 2 * N * N * s.H * s.D),
    "dot": _pairs(),
    "cosine": _pairs(),
    "nadaraya_watson": _pairs(),
    "additive": Cost(Kind.pairs, "O(N² (A + D_v) H)", lambda N, s: 2 * N * N * s.D),
    "softmax1": _pairs(),
    "synthesizer": Cost(Kind.pairs, "O(N² D)", lambda N, s: N * s.options["n_positions"] * s.D + N * N * s.D),
    "gau": _gated(Kind.pairs),
    "local": Cost(Kind.pattern, "O(r N D)", lambda N, s: 2 * N * min(N, 2 * s.options["window"] + 64) * s.D),
    "atrous": Cost(Kind.pattern, "O(N² D / r)", lambda N, s: 2 * N * N * s.D / s.options["rate"]),
    "sparse": Cost(Kind.pattern, "O(N (k + N / k) D)", lambda N, s: 2 * N * (3 * s.options["stride"] + N / s.options["stride"]) * s.D),
    "longformer": Cost(
        Kind.pattern, "O(N (w + C + G) D)", lambda N, s: 2 * N * min(N, s.options["window"] + 64 + 2 * s.options["n_global"]) * s.D
    ),
    "bigbird": Cost(
        Kind.pattern, "O(N b (5 + 2 r) D)", lambda N, s: 2 * N * min(N, s.options["block"] * (5 + 2 * s.options["n_random"])) * s.D
    ),
    "hybrid": Cost(Kind.pattern, "O(N (3 C + m) D)", lambda N, s: 2 * N * (min(N, 3 * s.options["block"]) + 2 * s.D_k) * s.D),
    "lsh": Cost(Kind.pattern, "O(R N c D + R N log N)", _lsh),
    "linear": Cost(Kind.sums, "O(N D²)", lambda N, s: 2 * N * s.D_k * s.D),
    "efficient": Cost(Kind.sums, "O(N D²)", lambda N, s: 2 * N * s.D_k * s.D),
    "performer": Cost(Kind.sums, "O(N m D)", lambda N, s: 4 * N * s.options["n_features"] * s.D),
    "vq": Cost(Kind.sums, "O(N S D)", lambda N, s: 4 * N * s.options["n_codes"] * s.D),
    "nystromformer": Cost(Kind.sums, "O(N m D + m³)", _nystrom),
    "flash": _flash(Kind.sums),
    "causal_softmax": _pairs(Kind.causal_pairs),
    "causal_dot": _pairs(Kind.causal_pairs),
    "causal_cosine": _pairs(Kind.causal_pairs),
    "causal_nadaraya_watson": _pairs(Kind.causal_pairs),
    "causal_additive": Cost(Kind.causal_pairs, "O(N² (A + D_v) H)", lambda N, s: 2 * N * N * s.D),
    "causal_softmax1": _pairs(Kind.causal_pairs),
    "causal_synthesizer": Cost(Kind.causal_pairs, "O(N N_max D)", lambda N, s: 2 * N * s.options["n_positions"] * s.D),
    "causal_lsh": Cost(Kind.causal_pairs, "O(N² (D + R H))", lambda N, s: 2 * N * N * s.D),
    "gated_softmax": _pairs(Kind.causal_pairs),
    "causal_atrous": Cost(Kind.causal_pairs, "O(N² D / r)", lambda N, s: 2 * N * N * s.D / s.options["rate"]),
    "causal_sparse": Cost(
        Kind.causal_pairs, "O(N (k + N / k) D)", lambda N, s: 2 * N * (2 * s.options["stride"] + N / s.options["stride"]) * s.D
    ),
    "causal_gau": _gated(Kind.causal_pairs),
    "sliding_window": Cost(Kind.causal_sums, "O(N w D)", lambda N, s: 2 * N * s.options["window"] * s.D),
    "causal_longformer": Cost(Kind.causal_sums, "O(N (w + g) D)", lambda N, s: 2 * N * (s.options["window"] + s.options["n_global"]) * s.D),
    "causal_linear": _recurrence("O(N D²)", lambda s: s.D_k),
    "causal_efficient": _recurrence("O(N D²)", lambda s: s.D_k),
    "causal_performer": _recurrence("O(N m D)", lambda s: 2 * s.options["n_features"]),
    "hedgehog": _recurrence("O(N D²)", lambda s: 3 * s.D_k),
    "based": _recurrence("O(N D_φ D)", lambda s: 273),
    "retention": _recurrence("O(N D²)", lambda s: s.D_k),
    "gated_linear": _recurrence("O(N D²)", lambda s: s.D_k),
    "delta": _recurrence("O(N D²)", lambda s: 2 * s.D_k),
    "gated_delta": _recurrence("O(N D²)", lambda s: 2 * s.D_k),
    "causal_vq": _recurrence("O(N S D)", lambda s: 2 * s.options["n_codes"]),
    "causal_flash": _flash(Kind.causal_sums),
    "convolution": Cost(Kind.other, "O(k N D²)", lambda N, s: s.options["kernel"] * N * s.D * s.D),
    "recurrent": Cost(Kind.other, "O(N D²)", lambda N, s: 6 * N * s.D * s.D),
}


@dataclass(frozen=True)
class Row:
    """A line of the complexity table: whose it is, operations that wait for each other, layers until every token has seen every other."""

    layer: str
    mechanism: str
    sequential: str
    path: str


TABLE = (
    Row("self-attention", "softmax", "O(1)", "O(1)"),
    Row("restricted (radius r)", "local", "O(1)", "O(N / r)"),
    Row("atrous r", "atrous", "O(1)", "disconnected classes"),
    Row("sparse k", "sparse", "O(1)", "2"),
    Row("convolution k", "convolution", "O(1)", "O(N / k)"),
    Row("recurrent", "recurrent", "O(N)", "O(N)"),
    Row("LSH, R rounds, chunk c", "lsh", "O(1)", "O(1) within a bucket"),
    Row("linear", "linear", "O(1) parallel, O(N) step", "O(1)"),
    Row("Performer m", "performer", "O(1) parallel, O(N) step", "O(1)"),
    Row("VQ S", "vq", "O(1) parallel, O(N) step", "O(1)"),
    Row("Nyström m", "nystromformer", "O(iterations)", "O(1)"),
    Row("FLASH group G", "flash", "O(N / G) causal", "O(1)"),
)
