"""What a draw does with each row. It is decided once for many draws: until a run joins, leaves or fails, or only some rows draw."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from service.generation.sampling.drawing import Ids, draw, draw_truncated, pieces, rows_of
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
    """Rows that are drawn at random together: R of the B rows of a draw."""

    rows: NDArray[np.intp]
    temperature: Floats | None  # (R,); None: all temperatures are 1
    truncation: Truncation | None  # None: no row's distribution is truncated
    uniforms: NDArray[np.float64]  # (K, R), the random numbers of the next K draws

    @classmethod
    def of(cls, rows: NDArray[np.intp], parameters: NDArray[Any], uniforms: UniformCache) -> Self:
        """Make the group of the rows (R,) with these parameters (R,). Either all or none are truncated."""
        temperature: Floats | None = parameters["temperature"]
        limits = None
        if parameters["truncated"][0]:
            limits = Truncation(parameters["top_k"], parameters["top_p"], parameters["min_p"], parameters["typical_p"])
        elif (parameters["temperature"] == 1).all():
            temperature = None
        return cls(rows, temperature, limits, uniforms.ahead(rows, parameters["seed"], parameters["position"]))

    def draw(self, scores: Floats, peaks: Floats, n_before: int) -> Ids:
        """Draw a token for each row of the group, after `n_before` draws: (B, V), (B,) -> (R,)."""
        own, highest = rows_of(scores, self.rows), peaks[self.rows]
        if self.truncation is None:
            return draw(own, highest, self.temperature, self.uniforms[n_before])
        assert self.temperature is not None
        return draw_truncated(own, highest, self.temperature, self.truncation, self.uniforms[n_before])


@dataclass(slots=True)
class Plan:
    """What draws do with B rows. In `groups` and `logprob_rows`, as many rows are together as fit into a core's cache."""

    n_rows: int
    any_greedy: bool  # whether the likeliest token of some row may be its token
    groups: list[Group]
    logprob_rows: list[NDArray[np.intp]]  # rows whose log-probabilities are requested
    n_draws: int = 0  # draws that were made by this plan

    @classmethod
    def of(cls, rows: NDArray[Any], drawable: NDArray[np.bool_], uniforms: UniformCache, vocab_size: int) -> Self:
        """Make the plan for the rows with these parameters (B,), of which those are drawn for which `drawable` (B,) is True."""
        warm, truncated = drawable & (rows["temperature"] > 0), rows["truncated"]
        groups = [
            Group.of(chosen, rows[chosen], uniforms)
            for alike in (warm & ~truncated, warm & truncated)
            for chosen in pieces(np.flatnonzero(alike), vocab_size)
        ]
        logprob_rows = list(pieces(np.flatnonzero(drawable & (rows["top_logprobs"] >= 0)), vocab_size))
        return cls(len(rows), not warm.all(), groups, logprob_rows)

    def fits(self, n_rows: int) -> bool:
        """Return whether the plan can be used for one more draw of `n_rows` rows."""
        return self.n_rows == n_rows and all(self.n_draws < len(group.uniforms) for group in self.groups)
