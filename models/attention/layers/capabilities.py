"""The features that a layer supports, as data. Tests choose their checks by them, and models choose which arguments they pass."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The features that a class in `LAYERS` supports with its default options. With other options a layer may have other `capabilities`.

    The defaults describe an encoder layer that depends on the content of tokens but not on their order.
    """

    # "pairs": the layer computes a weight for every pair of tokens. "pattern": for the pairs of a fixed pattern or hash. "sums": it sums
    # over tokens, landmarks or codes, and its matrix of weights must be derived from these sums. "none": the layer is not attention.
    weights: Literal["pairs", "pattern", "sums", "none"] = "pairs"
    causal: bool = False  # True: a token attends to itself and earlier tokens (`CausalLayer`). False: also to later tokens
    cross: bool = True  # the mechanism's function accepts N_q queries of one sequence and N_k keys of another
    # How a causal layer's state grows with the tokens. bounded: the state has space for N_max tokens.
    state: Literal["none", "growing", "bounded", "constant"] = "none"
    # Name of an option: N is padded to a multiple of its value. In causal layers this is the `chunk` of the recurrence.
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
        """Whether the layer never forms its attention matrix, so that the matrix must be derived from its sums."""
        return self.weights == "sums"


def refuse_cross(name: str, **tensors: Tensor) -> None:
    """Raise ValueError if these tensors (B, H, N, ..) differ in N, for the mechanism `name`, which attends only within one sequence."""
    (first, one), *others = tensors.items()
    for other, x in others:
        if x.shape[2] != one.shape[2]:
            told = f"{first} has {one.shape[2]} tokens and {other} has {x.shape[2]}"
            raise ValueError(
                f"{name} attends within one sequence, but {told}; give equally many of both, or use softmax attention between sequences"
            )


def of_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Return the output if there is no row, no query or no key: zeros (B, H, N_q, D_v). Otherwise return None."""
    return v.new_zeros(*q.shape[:3], v.shape[-1]) if 0 in (q.shape[0], q.shape[2], k.shape[2]) else None
