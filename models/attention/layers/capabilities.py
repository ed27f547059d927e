"""The features that a layer supports, as data. By them tests choose their checks, and models the arguments that they pass to a layer."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The features that a class in `LAYERS` supports with its default options; a layer's own attribute `capabilities` takes its options
    into account. The defaults describe an encoder layer that depends on the content of tokens but not on their order.
    """

    # "pairs": the layer computes a weight for every pair of tokens. "pattern": it computes weights only for the pairs that a fixed pattern
    # or a hash selects. "sums": it computes sums over tokens, landmarks or codes instead of a matrix of weights. The matrix can only be
    # derived from the layer's outputs, as `models/maps/` does. "none": the layer is not attention.
    weights: Literal["pairs", "pattern", "sums", "none"] = "pairs"
    causal: bool = False  # True: a token attends to itself and earlier tokens (`CausalLayer`). False: also to later tokens
    cross: bool = True  # the mechanism's function accepts N_q queries of one sequence and N_k keys of another
    # The state of a causal layer. growing: it grows with every token. bounded: it has a constant size, and space for N_max tokens only.
    # constant: it has a constant size, for any number of tokens. none: the layer is not causal.
    state: Literal["none", "growing", "bounded", "constant"] = "none"
    # Name of an option of the layer, such as "block": N is padded to a multiple of the option's value. A causal layer names "chunk", which
    # is an option of its recurrence.
    pads_to: str | None = None
    rotates: bool = False  # accepts a rotation (rotary positions) of q and k
    pairs: bool = False  # accepts a pair mask and a pair bias, which change the scores of single pairs of tokens
    # True: outputs depend on the order of tokens, even without position encodings. False: permuting tokens permutes outputs.
    ordered: bool = False
    straight_through: bool = False  # the layer's gradient is a straight-through estimate, which differs from finite differences
    averages: bool = True  # the weights of a query sum to 1, so a constant added to all values is added to the output (before any gate)

    @classmethod
    def of_cache(cls, **more: Any) -> "Capabilities":
        """Return the capabilities of a causal layer that keeps all keys and values, with the changes in `more`."""
        stated: dict[str, Any] = {"causal": True, "cross": False, "state": "growing"} | more
        return cls(**stated)

    @classmethod
    def of_recurrence(cls, **more: Any) -> "Capabilities":
        """Return the capabilities of a causal layer whose state is a matrix of constant size, with the changes in `more`."""
        stated: dict[str, Any] = {"causal": True, "cross": False, "state": "constant", "pads_to": "chunk", "weights": "sums"} | more
        return cls(**stated)

    @property
    def effective(self) -> bool:
        """Whether the layer never computes its matrix of attention weights, so that it must be derived from the outputs."""
        return self.weights == "sums"


def refuse_cross(name: str, **tensors: Tensor) -> None:
    """Raise ValueError if the tensors (B, H, N, ..) differ in N, because the mechanism called `name` attends only within one sequence."""
    (first, one), *others = tensors.items()
    for other, x in others:
        if x.shape[2] != one.shape[2]:
            told = f"{first} has {one.shape[2]} tokens and {other} has {x.shape[2]}"
            raise ValueError(
                f"{name} attends within one sequence, but {told}; give equally many of both, or use softmax attention between sequences"
            )


def of_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Return zeros (B, H, N_q, D_v) if B, N_q or N_k is 0, when there is nothing to compute. Otherwise return None."""
    return v.new_zeros(*q.shape[:3], v.shape[-1]) if 0 in (q.shape[0], q.shape[2], k.shape[2]) else None
