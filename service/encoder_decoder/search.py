"""Searches for the most likely outputs of one source, by greedy search if there is one beam, else by beam search.

Outputs are ranked by log p / length, the mean log-probability of a token, end token included. With K beams, a finished output is kept
unless K other outputs are better. The search ends when all kept outputs are finished. The algorithm is that of
`models/encoder_decoder/search.py`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.generation.request import FinishReason, TokenLogprob

Weights = NDArray[np.float32]  # (N,): attention weights of one token over the source


@dataclass(frozen=True)
class Path:
    """One output of a search, finished or not."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    log_p: float = 0.0
    weights: tuple[Weights, ...] = ()
    finish_reason: FinishReason | None = None

    @property
    def score(self) -> float:
        return self.log_p / max(len(self.tokens), 1)


class Search:
    """A search with K beams, for K outputs of one source. `alive` are the unfinished outputs, in the order of their rows in the batch."""

    def __init__(
        self, *, beams: int, length: int, max_tokens: int, begin_token_id: int, end_token_id: int, top_logprobs: int | None
    ) -> None:
        """`length` is the number of tokens of the source."""
        self.alive: list[Path] = [Path()]
        self._ended: list[Path] = []
        self._beams, self._length, self._max_tokens = beams, length, max_tokens
        self._begin, self._end, self._top = begin_token_id, end_token_id, top_logprobs

    @property
    def previous(self) -> list[int]:
        """Return the last token of each unfinished output."""
        return [path.tokens[-1] if path.tokens else self._begin for path in self.alive]

    @property
    def found(self) -> list[Path]:
        """Return all outputs, finished and unfinished, best first."""
        return sorted((*self._ended, *self.alive), key=lambda path: -path.score)

    def advance(self, logits: NDArray[np.float32], attention: NDArray[np.float32]) -> list[int]:
        """Extend each unfinished output by one token. `logits` (R, V) and `attention` weights (R, N) are those of its row. Returns, for
        each output now in `alive`, the row of the output that it extends.
        """
        scores = logits.astype(np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        log_p = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))  # (R, V)
        likeliest = np.argsort(-log_p, axis=1, kind="stable")[:, : self._beams]
        candidates: list[tuple[float, int, Path | int]] = [(path.score, -1, path) for path in self._ended]
        for row, (path, token_ids) in enumerate(zip(self.alive, likeliest.tolist(), strict=True)):
            length = len(path.tokens) + 1
            candidates += [((path.log_p + float(log_p[row, token])) / length, row, token) for token in token_ids]
        candidates.sort(key=lambda candidate: -candidate[0])
        parents, alive, ended = [], [], []
        for _, row, what in candidates[: self._beams]:
            if isinstance(what, Path):
                ended.append(what)
                continue
            path = self._longer(self.alive[row], what, log_p[row], attention[row, : self._length])
            if path.finish_reason is None:
                alive.append(path)
                parents.append(row)
            else:
                ended.append(path)
        self.alive, self._ended = alive, ended
        return parents

    def _longer(self, path: Path, token: int, log_p: NDArray[np.float64], weights: Weights) -> Path:
        finish: FinishReason | None = "stop" if token == self._end else "length" if len(path.tokens) + 1 >= self._max_tokens else None
        logprobs = path.logprobs if self._top is None else (*path.logprobs, self._logprob(token, log_p, self._top))
        return Path((*path.tokens, token), logprobs, path.log_p + float(log_p[token]), (*path.weights, weights.copy()), finish)

    def _logprob(self, token: int, log_p: NDArray[np.float64], top: int) -> TokenLogprob:
        best = np.argsort(-log_p, kind="stable")[:top].tolist()
        return TokenLogprob(token, float(log_p[token]), tuple((each, float(log_p[each])) for each in best))
