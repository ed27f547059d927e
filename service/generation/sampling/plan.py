"""What a draw does with each row. It is decided once for many draws: until a run joins, leaves or fails, or only some rows draw."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from service.generation.sampling.drawing import Doubles, Ids, draw_truncated, pieces, rows_of
from service.generation.sampling.graph import FIRST, GREEDY
from service.generation.sampling.random import UniformCache
from service.generation.sampling.scratch import Floats
from service.generation.sampling.truncation import Truncation

ROW: Final = np.dtype(  # the parameters of a row
    [
        ("seed", np.uint64),
        ("position", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("typical_p", np.float64),
        ("truncated", np.bool_),  # whether one of top_k, top_p, min_p, typical_p is in use
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("top_logprobs", np.int64),  # -1: no log-probabilities
    ]
)


class Group(NamedTuple):
    """R of the B rows of a draw, whose distributions are truncated, and as many as fit into a core's cache."""

    rows: NDArray[np.intp]
    temperature: Floats  # (R,)
    truncation: Truncation

    @classmethod
    def of(cls, rows: NDArray[np.intp], parameters: NDArray[Any]) -> Self:
        """Make the group of the rows (R,) with these parameters (R,)."""
        limits = Truncation(parameters["top_k"], parameters["top_p"], parameters["min_p"], parameters["typical_p"])
        return cls(rows, parameters["temperature"], limits)

    def draw(self, scores: Floats, uniforms: Doubles, asked: NDArray[np.bool_]) -> tuple[NDArray[np.intp], Ids]:
        """Draw a token for each row of the group for which `asked` (B,) is True and whose largest score is finite: (B, V), (B,) -> these
        rows and their tokens.
        """
        peaks = rows_of(scores, self.rows).max(axis=1)
        drawn = asked[self.rows] & np.isfinite(peaks)
        rows, temperature, limits = self
        if not drawn.all():
            rows, peaks, temperature, limits = rows[drawn], peaks[drawn], temperature[drawn], limits.of(drawn)
        if not rows.size:
            return rows, rows
        return rows, draw_truncated(rows_of(scores, rows), peaks, temperature, limits, uniforms[rows])


@dataclass(slots=True)
class Plan:
    """What draws do with B rows."""

    uniforms: Doubles  # (K, B), the random numbers of the next K draws, above 0; FIRST for rows without temperature
    inverse_temperatures: Floats  # (B,)
    plain: NDArray[np.bool_]  # (B,), the rows that are drawn by the graph, since their distributions are not truncated
    ahead: list[bool]  # which rows can be drawn by the graph before it is known what a grammar or `min_tokens` forbids
    groups: list[Group]  # the rows that are not plain
    logprob_rows: list[NDArray[np.intp]]  # rows whose log-probabilities are requested, as many together as fit into a core's cache
    n_draws: int = 0  # draws that were made by this plan

    @classmethod
    def of(cls, rows: NDArray[Any], edited: list[bool], uniforms: UniformCache, vocab_size: int) -> Self:
        """Make the plan for the rows with these parameters (B,). Logits of `edited` rows are changed before each draw."""
        warm = rows["temperature"] > 0
        truncated, places = warm & rows["truncated"], np.flatnonzero(warm)
        ahead = uniforms.ahead(places, rows["seed"][places], rows["position"][places])
        numbers = np.full((len(ahead), len(rows)), FIRST)
        numbers[:, places] = np.maximum(ahead, FIRST)
        return cls(
            numbers,
            np.where(warm, 1 / np.where(warm, rows["temperature"], np.float32(1)), GREEDY),
            ~truncated,
            [not (changed or cut) for changed, cut in zip(edited, truncated.tolist(), strict=True)],
            [Group.of(chosen, rows[chosen]) for chosen in pieces(np.flatnonzero(truncated), vocab_size)],
            list(pieces(np.flatnonzero(rows["top_logprobs"] >= 0), vocab_size)),
        )

    @property
    def now(self) -> Doubles:
        """The random numbers of the next draw, (B,)."""
        numbers: Doubles = self.uniforms[self.n_draws]
        return numbers

    def fits(self, n_rows: int, n_draws: int) -> bool:
        """Return whether the plan can be used for this number of further draws of `n_rows` rows."""
        return len(self.plain) == n_rows and self.n_draws + n_draws <= len(self.uniforms)
