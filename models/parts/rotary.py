"""Rotary positions of decoders: the inverse frequencies of the rotation, and their scaling for texts longer than those of the training.

θ_i = base^(-2i/D_rot), i = 0 .. D_rot/2 - 1: at position t, the pair i of a head's columns is rotated by t θ_i (positions.py)

linear    θ_i / s                                             Chen et al. 2023, arXiv:2306.15595
dynamic   base (s n / n_0 - (s - 1))^(D_rot / (D_rot - 2)) in place of base, for texts of n > n_0 tokens ("dynamic NTK", bloc97 and
          emozilla 2023)
llama3    θ_i / s for wavelengths above n_0 / low, θ_i below n_0 / high, and a linear mixture between (Llama 3.1, Dubey et al. 2024,
          arXiv:2407.21783)
yarn      a mixture of θ_i and θ_i / s by the number of rotations within n_0 tokens, and sines and cosines times 0.1 ln s + 1
          (Peng et al. 2023, arXiv:2309.00071, sections 3.2 and 3.4)

s is `factor`, and n_0 is `original_positions`, the longest text of the training. The formulas, with the rounding of the borders of yarn,
are those of transformers 5.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from models.parts.positions import Rotation

Kind = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """A scaling of the inverse frequencies. Raises ValueError, with the value, if a field is invalid or missing for its kind."""

    kind: Kind
    factor: float  # s: how many times as long as in the training the texts can be
    original_positions: int | None = None  # n_0; all kinds but linear need it
    low_freq_factor: float | None = None  # llama3: wavelengths above n_0 / low_freq_factor are scaled in full
    high_freq_factor: float | None = None  # llama3: wavelengths below n_0 / high_freq_factor are not scaled
    beta_fast: float = 32.0  # yarn: frequencies with more rotations than this within n_0 tokens are not scaled
    beta_slow: float = 1.0  # yarn: frequencies with fewer rotations than this are scaled in full
    attention_factor: float | None = None  # yarn: sines and cosines are multiplied by this; None: 0.1 ln s + 1
    truncate: bool = True  # yarn: whether the borders between scaled and unscaled frequencies are rounded to whole pairs

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r} of the rotary scaling is not one of {', '.join(get_args(Kind))}")
        if not 1 <= self.factor < math.inf:
            raise ValueError(
                f"factor={self.factor} of the rotary scaling must be at least 1, as it stretches the positions of the training"
            )
        if self.kind != "linear" and not (isinstance(self.original_positions, int) and self.original_positions >= 1):
            raise ValueError(f"original_positions={self.original_positions!r} must be 1 or more for {self.kind} scaling")
        if self.kind == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            if low is None or high is None or not 0 < low < high:
                raise ValueError(f"low_freq_factor={low} and high_freq_factor={high} must be above 0, and the second above the first")
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow} and beta_fast={self.beta_fast} must be above 0, and the second above the first")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The rotary positions of all heads of a decoder: D_rot = `width` columns of a head are rotated.

    Raises ValueError, with the value, for an odd width or a base of 1 or less.
    """

    width: int
    base: float = 10_000.0
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        if self.width < 2 or self.width % 2:
            raise ValueError(f"width={self.width}, but a rotation needs pairs of columns; choose an even width of at least 2")
        if not 1 < self.base < math.inf:
            raise ValueError(f"base={self.base} of the rotation must be above 1; published models have 10,000 or more")

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles of a token depend on the length of its text, so that a text's outputs depend on how it is cut into calls."""
        return self.scaling is not None and self.scaling.kind == "dynamic"

    @property
    def inv_freq(self) -> Tensor:
        """The inverse frequencies θ_i, (D_rot/2,) float64, in radians per token. With dynamic scaling: for texts of at most n_0 tokens."""
        theta = _unscaled(self.width, self.base)
        if self.scaling is None or self.scaling.kind == "dynamic":
            return theta
        return {"linear": _linear, "llama3": _llama3, "yarn": _yarn}[self.scaling.kind](theta, self.base, self.scaling)

    @property
    def attention_factor(self) -> float:
        """The factor of all sines and cosines, so that scores are multiplied by its square: 1 unless the scaling is yarn."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        given = self.scaling.attention_factor
        return 0.1 * math.log(self.scaling.factor) + 1.0 if given is None else given

    def at(self, t: Tensor, *, dtype: torch.dtype, lengths: Tensor | None = None) -> Rotation:
        """Return the rotation of positions t (B, N) int64, with angles (B, 1, N, D_rot/2).

        lengths (B,) int64: number of tokens of each row up to the end of this call, which only dynamic scaling reads; None: the last
        position of the row, plus 1. Angles are computed in float64, since in float32 they would be wrong by 0.06 at position 10⁶.
        """
        if self.depends_on_length:
            inv_freq = self._dynamic(t[:, -1] + 1 if lengths is None else lengths)[:, None, :]  # (B, 1, D_rot/2)
        else:
            inv_freq = self.inv_freq.to(t.device)
        angles = (t.unsqueeze(-1) * inv_freq).unsqueeze(1)  # (B, 1, N, D_rot/2)
        cos, sin = angles.cos(), angles.sin()
        if (factor := self.attention_factor) != 1.0:
            cos, sin = cos * factor, sin * factor
        return Rotation(cos.to(dtype), sin.to(dtype))

    def _dynamic(self, lengths: Tensor) -> Tensor:
        """Return the inverse frequencies of rows of `lengths` (B,) tokens: (B, D_rot/2)."""
        assert self.scaling is not None
        assert self.scaling.original_positions is not None
        n_0, s, D = self.scaling.original_positions, self.scaling.factor, self.width
        n = lengths.clamp_min(n_0).double()
        base = self.base * (s * n / n_0 - (s - 1)) ** (D / (D - 2) if D > 2 else 1.0)  # the only frequency of 2 columns is 1 for any base
        return base[:, None] ** -_exponents(D, lengths.device)


def _exponents(width: int, device: torch.device | None = None) -> Tensor:
    return torch.arange(0, width, 2, dtype=torch.float64, device=device) / width


def _unscaled(width: int, base: float) -> Tensor:
    return base ** -_exponents(width)


def _linear(theta: Tensor, base: float, scaling: RotaryScaling) -> Tensor:
    return theta / scaling.factor


def _llama3(theta: Tensor, base: float, scaling: RotaryScaling) -> Tensor:
    assert scaling.original_positions is not None
    assert scaling.low_freq_factor is not None
    assert scaling.high_freq_factor is not None
    rotations = scaling.original_positions * theta / (2 * math.pi)  # of each pair within n_0 tokens: n_0 divided by the wavelength
    unscaled = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(theta / scaling.factor, theta, unscaled.clamp(0, 1))


def _yarn(theta: Tensor, base: float, scaling: RotaryScaling) -> Tensor:
    assert scaling.original_positions is not None
    D = 2 * len(theta)

    def pair(n_rotations: float) -> float:
        """Return the index i, not rounded, of the pair with this number of rotations within n_0 tokens."""
        return D * math.log(scaling.original_positions / (n_rotations * 2 * math.pi)) / (2 * math.log(base))  # type: ignore[operator]

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    width = last - first or 0.001  # avoids 0 / 0
    scaled = ((torch.arange(len(theta), dtype=torch.float64) - first) / width).clamp(0, 1)
    return torch.lerp(theta, theta / scaling.factor, scaled)
