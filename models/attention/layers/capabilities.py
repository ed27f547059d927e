"""What a layer can do, as data: the shared tests read it to know what to ask of a layer, the models to know what to offer one."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from models.parts.positions import Rotation


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Of one class in `LAYERS` with its default options; a layer built with others has `capabilities` of its own where they differ.

    The defaults are those of an encoder's layer that knows tokens by their content alone.
    """

    # The weights of pairs of tokens: formed for all, or for pairs that a pattern or a hash chooses; or never, or not all, since the layer
    # sums over tokens, landmarks or codes, and its matrix is the effective one, unrolled from the sums; none: no attention.
    weights: Literal["pairs", "pattern", "sums", "none"] = "pairs"
    causal: bool = False  # a token sees itself and its past, in the interface of `CausalLayer`; otherwise past and future
    cross: bool = True  # its function takes N_q queries of one sequence to N_k keys of another
    state: Literal["none", "growing", "bounded", "constant"] = "none"  # what a causal one keeps; bounded: full after a largest N
    pads_to: str | None = None  # N is padded inside to a multiple of this: an option or, of causal layers, `chunk` of their recurrence
    rotates: bool = False  # takes a rotation of q and k by their positions
    pairs: bool = False  # takes a pair mask and a pair bias, which act on single pairs of tokens
    ordered: bool = False  # knows the tokens' order by itself; otherwise permuting them permutes the outputs
    straight_through: bool = False  # its gradient is an estimate, which finite differences do not show
    averages: bool = True  # the weights of a query sum to 1: what all values have in common passes through, to a gate if there is one

    @classmethod
    def of_cache(cls, **more: Any) -> "Capabilities":
        """Of a causal layer that keeps all keys and values."""
        stated: dict[str, Any] = {"causal": True, "cross": False, "state": "growing"} | more
        return cls(**stated)

    @classmethod
    def of_recurrence(cls, **more: Any) -> "Capabilities":
        """Of a causal layer whose past is a matrix of constant size."""
        stated: dict[str, Any] = {"causal": True, "cross": False, "state": "constant", "pads_to": "chunk", "weights": "sums"} | more
        return cls(**stated)

    @property
    def effective(self) -> bool:
        """The matrix of the layer is unrolled from sums, and not what it computes."""
        return self.weights == "sums"


def refuse_cross(name: str, **tensors: Tensor) -> None:
    """Raises ValueError, with both numbers, where these (B, H, N, ..) of the mechanism called `name`, which has no `cross`, differ in N."""
    (first, one), *others = tensors.items()
    for other, x in others:
        if x.shape[2] != one.shape[2]:
            told = f"{first} has {one.shape[2]} tokens and {other} has {x.shape[2]}"
            raise ValueError(f"{name} is within one sequence, and {told}; give as many of both, or take softmax attention across sequences")


def of_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """What every mechanism answers where there is no query or no key: 0, (B, H, N_q, D_v). None where there are both."""
    return v.new_zeros(*q.shape[:3], v.shape[-1]) if 0 in (q.shape[0], q.shape[2], k.shape[2]) else None


def refuse_pairs(name: str, rotation: Rotation | None, pair_mask: Tensor | None, pair_bias: Tensor | None) -> None:
    """Raises ValueError if any of the three is given to the layer called `name`, which cannot `pairs`."""
    if rotation is not None or pair_mask is not None or pair_bias is not None:
        raise ValueError(f"{name} has no form for a rotation, a pair mask or a pair bias; use softmax attention")
