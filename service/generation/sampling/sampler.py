"""Samples tokens from logits for all running rows at once. Each row has its own parameters, history and random numbers.

The order of steps is that of vLLM and Hugging Face: logit_bias and allowed ids; penalties; grammar masks and banned tokens; temperature;
top_k, top_p, min_p, typical_p; one draw. Reported log-probabilities are those of the unmodified logits.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidRequest, RuntimeFailed, ServiceError
from service.generation.request import Sampling, TokenLogprob
from service.generation.sampling.drawing import Ids, largest, log_totals, pieces, rows_of
from service.generation.sampling.grammar import Words
from service.generation.sampling.graph import Draws, draw, session
from service.generation.sampling.plan import ROW, Plan
from service.generation.sampling.prompt_logprobs import PromptLogprobs, Told
from service.generation.sampling.random import UniformCache
from service.generation.sampling.scratch import Floats

SAMPLER_VERSION: Final = 3  # increase it with every change of code that makes a seed give other tokens
COLDEST: Final = 1e-5  # a lower temperature counts as 0, as in vLLM, because dividing by it would overflow


@dataclass(frozen=True, slots=True)
class Drawn:
    """The result of one call of `Sampler.draw`. A row that failed has token id -1, and its position does not advance."""

    token_ids: Ids  # (B,)
    logprobs: Mapping[int, TokenLogprob]  # row -> log-probabilities, for the rows that requested them
    failures: Mapping[int, ServiceError]


class Sampler:
    """The parameters and token counts of up to `slots` rows. The rows in use are the first ones. Not thread-safe.

    Rows whose logits are not edited can be drawn ahead, on the core that computes their logits: by `begin_ahead`, and the calls of `ahead`
    after the logits were computed. The next calls of `draw` then take their tokens as they are.
    """

    def __init__(self, vocab_size: int, slots: int, most_ahead: int = 1) -> None:
        """`most_ahead` is the largest number of draws that are made ahead."""
        self.vocab_size = vocab_size
        self._rows = np.zeros(slots, ROW)
        self._edits: list[Edits | None] = [None] * slots  # None: the row's logits are not edited
        self._uniforms = UniformCache(slots)
        self._scores = np.empty((slots, vocab_size), np.float32)
        session()  # so that the first draw does not wait until it is opened
        self._draws = [Draws.empty(slots) for _ in range(most_ahead)]  # what is drawn ahead, by number of the draw
        self._at, self._n_ahead = 0, 0  # number of the next draw, and how many are drawn ahead
        self._known = [False] * slots  # whether the row's next token is in `_draws`
        self._planned: Plan | None = None  # None: a row has changed
        self._quiet = copy_context()  # entering it is quicker than `np.errstate`
        self._quiet.run(np.seterr, over="ignore", invalid="ignore")

    def put(self, row: int, sampling: Sampling, edits: "Edits | None", *, position: int, top_logprobs: int | None) -> None:
        """Start or resume a run in this row. Its `edits` are made by `Edits.of` before, so that the time does not depend on the length of
        prompt and completion. Later draws update `edits`.
        """
        self._edits[row], self._known[row], self._planned = edits, False, None
        self._rows[row] = (
            sampling.seed,
            position,
            sampling.temperature if sampling.temperature >= COLDEST else 0.0,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.typical_p,
            (sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p) != (0, 1, 0, 1),
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            -1 if top_logprobs is None else top_logprobs,
        )

    def move(self, source: int, target: int) -> None:
        """Move the run of row `source` to row `target`. `source` is then free."""
        self._rows[target], self._planned = self._rows[source], None
        self._known[target] = self._known[source]
        for draws in self._draws[self._at :]:
            draws.token_ids[target], draws.totals[target] = draws.token_ids[source], draws.totals[source]
        self._edits[target], self._edits[source] = self._edits[source], None

    def all_ahead(self, n_rows: int) -> bool:
        """Return whether all of the first rows can be drawn ahead."""
        return all(self._plan(n_rows).ahead)

    def begin_ahead(self, n_rows: int, n_draws: int = 1) -> bool:
        """Return whether any of the first rows can be drawn ahead. If so, the next draws are those that the calls of `ahead` make."""
        plan = self._plan(n_rows, n_draws)
        if not any(plan.ahead):
            return False
        for number in range(n_draws):
            self._draws[number].uniforms[:n_rows, 0] = plan.uniforms[plan.n_draws + number]
        self._known[:n_rows] = plan.ahead
        self._at, self._n_ahead = 0, n_draws
        return True

    def ahead(self, logits: Floats, number: int = 0) -> Callable[[slice], Callable[[], None]]:
        """Return a function that takes some rows and returns the call that makes draw `number` for them, from `logits` (S, V)."""
        return lambda rows: self._draws[number].of(rows).bound(logits[rows])

    def token_ids(self, number: int) -> Ids:
        """Return where the call of `ahead` writes the tokens of a draw, (S, 1)."""
        return self._draws[number].token_ids

    def draw(
        self,
        logits: Floats,
        *,
        masks: Mapping[int, Words] | None = None,
        banned: Sequence[Sequence[int]] = (),
        only: NDArray[np.bool_] | None = None,
    ) -> Drawn:
        """Draw a token for each of the first B rows, and advance their positions by one. `logits` (B, V) are not changed.

        `masks` maps rows to bitmasks of allowed tokens (1 = allowed). `banned` contains, for each row, the ids that may not be drawn now.
        If `only` (B,) is given, rows where it is False are left as they are, and their token ids mean nothing.
        """
        n_rows = len(logits)
        plan, draws, known = self._plan(n_rows), self._draws[self._at], self._known[:n_rows]
        token_ids = draws.token_ids[:n_rows, 0].copy()
        # Every operation of numpy counts here: after a step, the caches have the model's weights and not this code.
        if only is None and all(known) and not masks and not any(banned) and draws.totals[:n_rows].min() > 0:
            drawn, failures = None, dict[int, ServiceError]()
            self._rows["position"][:n_rows] += 1
        else:
            drawn = np.ones(n_rows, np.bool_) if only is None else only.copy()
            failures = self._quiet.run(self._draw_rest, token_ids, logits, masks or {}, banned, known, drawn)
            self._advance(token_ids, drawn)
            self._known[:n_rows] = [was and went_on for was, went_on in zip(known, drawn.tolist(), strict=True)]
        self._at += 1
        if self._at >= self._n_ahead:
            self._at, self._n_ahead, self._known[:n_rows] = 0, 0, [False] * n_rows
        plan.n_draws += 1
        if only is not None or failures:
            self._planned = None  # its rows are no longer at the same draw
        groups = plan.logprob_rows if drawn is None else [left for rows in plan.logprob_rows if (left := rows[drawn[rows]]).size]
        return Drawn(token_ids, self._quiet.run(self._logprobs, logits, groups, token_ids) if groups else {}, failures)

    def _draw_rest(
        self,
        token_ids: Ids,
        logits: Floats,
        masks: Mapping[int, Words],
        banned: Sequence[Sequence[int]],
        known: list[bool],
        wanted: NDArray[np.bool_],
    ) -> dict[int, ServiceError]:
        """Draw the wanted rows whose tokens are not known, or known for logits that are edited now. Shapes: (B,), (B, V), .., (B,), (B,).
        Change `token_ids` and set `wanted` to False for rows that failed. Return their errors.
        """
        edited = [
            row for row, edit in enumerate(self._edits[: len(logits)]) if edit is not None or row in masks or any(banned[row : row + 1])
        ]
        rest = ~np.array(known) | np.isnan(self._draws[self._at].totals[: len(logits), 0])
        rest[edited] = True
        rest &= wanted
        plan, scores = self._plan(len(logits)), self._edited(logits, masks, banned, edited, rest)
        token_ids[rest] = -1
        if (plain := np.flatnonzero(rest & plan.plain)).size:
            token_ids[plain] = draw(rows_of(scores, plain), plan.inverse_temperatures[plain], plan.now[plain])
        for group in plan.groups:
            rows, drawn = group.draw(scores, plan.now, rest)
            token_ids[rows] = drawn
        token_ids[[row for row in edited if not np.isfinite(logits[row].max())]] = -1
        failed = np.flatnonzero(wanted & (token_ids < 0)).tolist()
        wanted[failed] = False
        return {row: self._failure(row, logits[row], any(banned[row : row + 1])) for row in failed}

    def _plan(self, n_rows: int, n_draws: int = 1) -> Plan:
        """Return the plan of this number of draws for all of the first rows."""
        if self._planned is None or not self._planned.fits(n_rows, n_draws):
            edited = [edit is not None for edit in self._edits[:n_rows]]
            self._planned = Plan.of(self._rows[:n_rows], edited, self._uniforms, self.vocab_size)
            for draws in self._draws:
                draws.inverse_temperatures[:n_rows, 0] = self._planned.inverse_temperatures
        return self._planned

    def _edited(
        self,
        logits: Floats,
        masks: Mapping[int, Words],
        banned: Sequence[Sequence[int]],
        edited: list[int],
        wanted: NDArray[np.bool_],
    ) -> Floats:
        """Return a copy of the wanted rows' logits with the biases, penalties, masks and banned ids of the `edited` rows applied. If there
        are no such rows, return the logits themselves.
        """
        if not edited:
            return logits
        scores = self._scores[: len(logits)]
        for row in np.flatnonzero(wanted).tolist():
            scores[row] = logits[row]
        edits = [(row, edit) for row in edited if (edit := self._edits[row]) is not None]
        for row, edit in edits:
            edit.bias(scores[row])
        self._penalise(scores, [(row, edit.counts) for row, edit in edits if len(edit.counts.token_ids)])
        for row, words in masks.items():
            allowed = _bits(words.view(np.uint8), self.vocab_size)
            scores[row, ~allowed] = -np.inf
        for row, token_ids in enumerate(banned):
            scores[row, list(token_ids)] = -np.inf
        return scores

    def _penalise(self, scores: Floats, seen: list[tuple[int, "_Counts"]]) -> None:
        """Apply the penalties in place: repetition as in CTRL (Keskar et al. 2019, section 4.1), for scores of either sign; frequency and
        presence as in OpenAI's API."""
        if not seen:
            return
        row = np.repeat([row for row, _ in seen], [len(counts.token_ids) for _, counts in seen])
        token_id = np.concatenate([counts.token_ids for _, counts in seen])
        count = np.concatenate([counts.counts for _, counts in seen]).astype(np.float32)
        repetition = self._rows["repetition_penalty"][row]
        score = scores[row, token_id]
        score = np.where(score < 0, score * repetition, score / repetition)
        score -= self._rows["frequency_penalty"][row] * count + self._rows["presence_penalty"][row] * (count > 0)
        scores[row, token_id] = score

    def _logprobs(self, logits: Floats, groups: list[NDArray[np.intp]], token_ids: Ids) -> dict[int, TokenLogprob]:
        found: dict[int, TokenLogprob] = {}
        for rows in groups:
            logprobs = _token_logprobs(rows_of(logits, rows), token_ids[rows], self._rows["top_logprobs"][rows])
            found.update(zip(rows.tolist(), logprobs, strict=True))
        return found

    def _advance(self, token_ids: Ids, drawable: NDArray[np.bool_]) -> None:
        self._rows["position"][: len(token_ids)] += drawable
        for row, edit in enumerate(self._edits[: len(token_ids)]):
            if edit is not None and edit.counted and drawable[row]:
                edit.counts.add(int(token_ids[row]))

    def _failure(self, row: int, logits: Floats, banned: bool) -> ServiceError:
        position, edit = int(self._rows["position"][row]), self._edits[row]
        if not np.isfinite(logits.max()):
            return RuntimeFailed(f"the model's logits at position {position} are not finite")
        return InvalidRequest(
            f"no token may stand at position {position}: grammar, allowed_token_ids, logit_bias and min_tokens together leave none",
            param="allowed_token_ids" if edit is not None and edit.allowed is not None else "min_tokens" if banned else None,
        )


def logprobs_of(logits: Floats, token_ids: Sequence[int], n_top: int) -> PromptLogprobs:
    """Return, for each token, its log-probability and rank, and the `n_top` most likely alternatives: logits (M, V), M token ids -> M
    entries.

    A token whose logit is -inf has log-probability -inf. Raises RuntimeFailed if a row's largest logit is not finite.
    """
    if not np.isfinite(logits.max(axis=1)).all():
        raise RuntimeFailed("the model's logits of the prompt are not finite")
    told = PromptLogprobs()
    for rows in pieces(np.arange(len(logits)), logits.shape[1]):
        scores, asked = rows_of(logits, rows), np.asarray(token_ids, np.int64)[rows]
        peaks, given = scores.max(axis=1), _at(scores, asked)
        ranks = 1 + np.count_nonzero(scores > given[:, None], axis=1)
        totals = log_totals(scores, peaks)
        distances, ids = np.zeros((len(rows), 0), np.float32), np.zeros((len(rows), 0), np.int64)
        if n_top:
            distances, ids = largest(scores, peaks, np.full(len(rows), n_top))
        top_ids, top_distances = ids[:, :n_top].astype(np.int32), distances[:, :n_top].copy()
        told.extend(Told(asked.astype(np.int32), given - peaks - totals, ranks.astype(np.int32), top_ids, top_distances, totals))
    return told


_RANGES: Final = {  # Field -> smallest and largest value. No API dialect accepts more, and no value in the range can make a draw fail.
    "seed": (0, 2**64 - 1),
    "top_k": (0, 2**31 - 1),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (1e-6, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}


def check_sampling(sampling: Sampling, vocab_size: int, checked: set[int] | None = None) -> None:
    """Raise InvalidRequest, with the field's name as `param`, if a value is invalid for this vocabulary. `checked` contains the `id()` of
    each collection of token ids that was checked before.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        kind = int if name in ("seed", "top_k") else int | float
        if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidRequest(
                f"{name} is {value!r} and must be {'an integer' if kind is int else 'a number'} from {low:g} to {high:g}", param=name
            )
    checked = set() if checked is None else checked
    for name, token_ids in (("logit_bias", sampling.logit_bias), ("allowed_token_ids", sampling.allowed_token_ids)):
        if token_ids and id(token_ids) not in checked:
            check_ids(token_ids, vocab_size, name)
            checked.add(id(token_ids))
            for token_id, bias in sampling.logit_bias.items() if name == "logit_bias" else ():
                if not -100 <= bias <= 100:
                    raise InvalidRequest(f"the logit_bias of token {token_id} is {bias} and must be from -100 to 100", param="logit_bias")


def check_ids(token_ids: Collection[int], vocab_size: int, name: str) -> None:
    """Raise InvalidRequest unless all ids are in the vocabulary."""
    if token_ids and ((worst := max(token_ids)) >= vocab_size or (worst := min(token_ids)) < 0):
        raise InvalidRequest(f"token id {worst} of {name} is outside this model's vocabulary of {vocab_size}", param=name)


@dataclass(slots=True)
class _Counts:
    """Counts how often each token was drawn. Tokens that are only in the prompt have the count 0. The arrays are replaced when they
    grow.
    """

    token_ids: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, seen: NDArray[np.bool_] | None, completion: Sequence[int], vocab_size: int) -> "_Counts":
        """Return the counts of the completion's tokens. `seen` (V,) marks the prompt's tokens, because sorting a prompt of 100,000 tokens
        would take 40 ms.
        """
        drawn = np.bincount(np.array(completion, np.int64), minlength=vocab_size)
        token_ids = np.flatnonzero(drawn if seen is None else seen | (drawn > 0))
        return cls(token_ids, drawn[token_ids])

    def add(self, token_id: int) -> None:
        known = np.flatnonzero(self.token_ids == token_id)
        if known.size:
            self.counts[known[0]] += 1
        else:
            self.token_ids, self.counts = np.append(self.token_ids, token_id), np.append(self.counts, 1)


@dataclass(frozen=True, slots=True)
class Edits:
    """The changes that a run makes to its logits at every step."""

    bias_ids: Ids
    biases: Floats
    allowed: Ids | None
    counts: _Counts
    counted: bool

    @classmethod
    def of(
        cls,
        sampling: Sampling,
        vocab_size: int,
        prompt: Sequence[int],
        completion: Sequence[int] = (),
        made: dict[int, NDArray[Any]] | None = None,
        seen_before: NDArray[np.uint8] | None = None,
    ) -> "Edits | None":
        """Return the edits of a run, or None if it changes no logits. `made` caches arrays made from prompts and allowed ids, by the `id()`
        of their source. Bit i of `seen_before` (little-endian) is 1 if token i occurred before the prompt; the repetition penalty applies
        to these tokens too.
        """
        counted = _penalises(sampling)
        if not (sampling.logit_bias or sampling.allowed_token_ids or counted):
            return None
        made = {} if made is None else made
        allowed = seen = None
        if sampling.allowed_token_ids and (allowed := made.get(id(sampling.allowed_token_ids))) is None:
            allowed = made[id(sampling.allowed_token_ids)] = np.array(sampling.allowed_token_ids, np.int64)
        if sampling.repetition_penalty != 1 and (seen := made.get(id(prompt))) is None:
            seen = made[id(prompt)] = _bits(seen_before, vocab_size)
            seen[np.array(prompt, np.int64)] = True
        bias_ids, biases = np.array(list(sampling.logit_bias), np.int64), np.array(list(sampling.logit_bias.values()), np.float32)
        counts = _Counts.of(seen, completion, vocab_size) if counted else _Counts()
        return cls(bias_ids, biases, allowed, counts, counted)

    def bias(self, scores: Floats) -> None:
        """Apply the biases and the restriction to allowed ids to the scores (V,) of a row, in place."""
        scores[self.bias_ids] += self.biases
        if self.allowed is not None:
            kept = scores[self.allowed]
            scores.fill(-np.inf)
            scores[self.allowed] = kept


def _bits(packed: NDArray[np.uint8] | None, vocab_size: int) -> NDArray[np.bool_]:
    if packed is None:
        return np.zeros(vocab_size, np.bool_)
    return np.unpackbits(packed, count=vocab_size, bitorder="little").view(np.bool_)


def _penalises(sampling: Sampling) -> bool:
    return (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1, 0, 0)


def _token_logprobs(logits: Floats, token_ids: Ids, tops: Ids) -> list[TokenLogprob]:
    """Return the log-probabilities of the tokens, each with the likeliest alternatives, as many as `tops` says: (M, V), (M,), (M,) -> M
    entries. The largest logit of every row must be finite.
    """
    peaks = logits.max(axis=1)
    totals = log_totals(logits, peaks)
    own = _at(logits, token_ids) - peaks - totals
    if not tops.any():
        return [TokenLogprob(int(token_id), float(logprob)) for token_id, logprob in zip(token_ids, own, strict=True)]
    distances, ids = largest(logits, peaks, np.maximum(tops, 1))
    logprobs = -distances - totals[:, None]
    answers = []
    for row, top in enumerate(tops.tolist()):
        best = zip(ids[row, :top].tolist(), logprobs[row, :top].tolist(), strict=True)
        likeliest = tuple((token_id, logprob) for token_id, logprob in best if logprob > -math.inf)
        answers.append(TokenLogprob(int(token_ids[row]), float(own[row]), likeliest))
    return answers


def _at(scores: Floats, token_ids: Ids) -> Floats:
    return scores[np.arange(len(scores)), token_ids]
