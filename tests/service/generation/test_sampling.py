"""Logits to tokens: against a naive sampler written from the definitions, and each row by itself whatever stands beside it."""

import dataclasses
import hashlib
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from service.errors import InvalidRequest, RuntimeFailed
from service.generation.request import Sampling, TokenLogprob
from service.generation.sampling.drawing import draw_truncated
from service.generation.sampling.graph import draw
from service.generation.sampling.prompt_logprobs import PromptLogprobs, Told
from service.generation.sampling.random import UniformCache
from service.generation.sampling.sampler import SAMPLER_VERSION, Edits, Sampler, check_sampling, logprobs_of
from service.generation.sampling.truncation import DEEPEST, Truncation, truncate
from tests.service.fakes import first

V = 211  # prime: nothing divides it
FLOAT32 = 2e-6  # relative to 1: what float32 loses in a probability

MANNERS = [
    Sampling(seed=1, temperature=0),
    Sampling(seed=2),
    Sampling(seed=3, temperature=0.5),
    Sampling(seed=4, top_k=7),
    Sampling(seed=5, top_k=200),
    Sampling(seed=6, top_p=0.8),
    Sampling(seed=7, top_p=0.9999, temperature=3.0),
    Sampling(seed=8, min_p=0.1),
    Sampling(seed=9, typical_p=0.6),
    Sampling(seed=10, top_k=30, top_p=0.7, min_p=0.02, typical_p=0.9, temperature=1.3),
    Sampling(seed=11, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=-0.2),
    Sampling(seed=12, logit_bias={3: 100.0, 5: -100.0}, temperature=0),
    Sampling(seed=13, allowed_token_ids=(2, 50, 99)),
    Sampling(seed=14, top_p=0.3, min_p=0.5),
    Sampling(seed=15, temperature=0, repetition_penalty=1.2),
    Sampling(seed=17, top_k=100, min_p=0.2),
    Sampling(seed=16, logit_bias={7: 2.5}, top_k=3, frequency_penalty=1.0, allowed_token_ids=tuple(range(40))),
]


def some_logits(rows: int, seed: int = 0, vocab: int = V, scale: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def put(sampler: Sampler, row: int, sampling: Sampling, *, prompt: Any, completion: Any = (), top_logprobs: int | None = None) -> None:
    edits = Edits.of(sampling, sampler.vocab_size, prompt, completion)
    sampler.put(row, sampling, edits, position=len(prompt) + len(completion), top_logprobs=top_logprobs)


def naive_distribution(
    logits: NDArray[np.float32], sampling: Sampling, prompt: tuple[int, ...] = (), completion: tuple[int, ...] = ()
) -> dict[int, float]:
    """Token id -> probability, one step after the other, in plain Python floats."""
    scores = {token: float(score) for token, score in enumerate(logits)}
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if sampling.allowed_token_ids:
        scores = {token: scores[token] for token in sampling.allowed_token_ids}
    drawn = Counter(completion)
    for token in set(scores) & {*prompt, *completion}:
        scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
        scores[token] -= sampling.frequency_penalty * drawn[token] + sampling.presence_penalty * (drawn[token] > 0)
    if sampling.temperature == 0:
        return {min(scores, key=lambda token: (-scores[token], token)): 1.0}

    def normalised(weights: dict[int, float]) -> dict[int, float]:
        total = math.fsum(weights.values())
        return {token: weight / total for token, weight in weights.items()}

    def beginning(p: dict[int, float], order: list[int], mass: float) -> dict[int, float]:
        before = [0.0, *itertools.accumulate(p[token] for token in order)]
        return normalised({token: p[token] for at, token in enumerate(order) if at == 0 or before[at] < mass})

    peak = max(scores.values())
    p = normalised({token: math.exp((score - peak) / sampling.temperature) for token, score in scores.items()})
    best_first = sorted(p, key=lambda token: (-p[token], token))
    if sampling.top_k:
        best_first = best_first[: sampling.top_k]
        p = normalised({token: p[token] for token in best_first})
    if sampling.top_p < 1:
        p = beginning(p, best_first, sampling.top_p)
    least = sampling.min_p * max(p.values())
    p = normalised({token: weight for token, weight in p.items() if weight >= least})
    if sampling.typical_p < 1:
        entropy = -math.fsum(weight * math.log(weight) for weight in p.values())
        p = beginning(p, sorted(p, key=lambda token: abs(-math.log(p[token]) - entropy)), sampling.typical_p)
    return p


def frequencies(sampling: Sampling, logits: NDArray[np.float32], draws: int, *, prompt: Any = (), completion: Any = ()) -> dict[int, float]:
    """How often each token comes, over as many seeds."""
    sampler = Sampler(len(logits), draws)
    for row in range(draws):
        put(sampler, row, dataclasses.replace(sampling, seed=row), prompt=prompt, completion=completion)
    token_ids = sampler.draw(np.tile(logits, (draws, 1))).token_ids
    return {token: count / draws for token, count in Counter(token_ids.tolist()).items()}


# What is drawn ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", MANNERS, ids=lambda sampling: f"seed{sampling.seed}")
def test_tokens_come_as_often_as_a_naive_sampler_says(sampling: Sampling) -> None:
    """Support exactly, probabilities by chi-squared over those that are expected at least ten times."""
    logits, prompt, completion, draws = some_logits(1, seed=sampling.seed)[0], (1, 2, 3, 50), (50, 50, 60, 7), 4000
    expected = naive_distribution(logits, sampling, prompt, completion)
    found = frequencies(sampling, logits, draws, prompt=prompt, completion=completion)
    assert set(found) <= set(expected)
    common = [token for token, p in expected.items() if p * draws >= 10]
    assert common
    chi_squared = sum(draws * (found.get(token, 0) - expected[token]) ** 2 / expected[token] for token in common)
    degrees = len(common)
    assert chi_squared < degrees + 5 * math.sqrt(2 * degrees) + 5


def test_a_flat_distribution_is_cut_by_id() -> None:
    """Equal scores: the lower ids come first, in every filter, and the likeliest is the first."""
    flat = np.zeros(1000, np.float32)
    assert set(frequencies(Sampling(seed=0, top_k=5), flat, 500)) == {0, 1, 2, 3, 4}
    assert set(frequencies(Sampling(seed=0, top_p=0.004), flat, 500)) == {0, 1, 2, 3}
    assert set(frequencies(Sampling(seed=0, typical_p=0.004), flat, 500)) == {0, 1, 2, 3}
    assert set(frequencies(Sampling(seed=0, top_p=0.0), flat, 50)) == {0}
    assert len(set(frequencies(Sampling(seed=0, min_p=1.0), flat, 500))) > 300
    signed = np.where(np.arange(1000) % 2, np.float32(-0.0), np.float32(0.0))
    assert set(frequencies(Sampling(seed=0, top_k=4), signed, 500)) == {0, 1, 2, 3}
    assert set(frequencies(Sampling(seed=0, top_k=4), -signed, 500)) == {0, 1, 2, 3}
    assert set(frequencies(Sampling(seed=0, top_p=0.004), -signed, 500)) == {0, 1, 2, 3}
    assert set(frequencies(Sampling(seed=0, temperature=0), flat, 50)) == {0}


@pytest.mark.parametrize("scale", first(1, [1.0, 0.0, 1e-6, 4.0]))
@pytest.mark.parametrize("excluded", [3000])
def test_a_large_vocabulary_is_truncated_by_the_same_definitions(scale: float, excluded: int) -> None:
    """Rounding may move an end of what is kept by a token."""
    vocab = 20_032
    logits = some_logits(1, seed=4, vocab=vocab, scale=scale)[0]
    logits[:excluded] = -np.inf
    for fields in (
        {"typical_p": 0.9},
        {"top_p": 0.97, "typical_p": 0.95},
        {"top_k": 15_000},
        {"top_k": 15_000, "top_p": 0.99, "min_p": 1e-4, "typical_p": 0.98, "temperature": 3.0},
        {"typical_p": 0.0, "temperature": 2.0},
    ):
        sampling = Sampling(seed=0, **fields)
        depths = np.minimum(np.abs(logits.max() - logits) / np.float32(sampling.temperature), DEEPEST)
        weights = np.exp(-depths)
        truncate(weights[None], depths[None], Truncation(*(np.array([getattr(sampling, name)]) for name in Truncation._fields)))
        expected = naive_distribution(logits, dataclasses.replace(sampling, allowed_token_ids=tuple(range(excluded, len(logits)))))
        wrong = set(np.flatnonzero(weights).tolist()) ^ set(expected)
        assert len(wrong) <= 2, fields
        assert weights.any()
        found = weights / weights.sum(dtype=np.float64)
        assert all(found[token] == pytest.approx(p, rel=1e-3, abs=FLOAT32) for token, p in expected.items() if token not in wrong)
        assert set(frequencies(sampling, logits, 20)) <= set(expected) | wrong


def test_cold_is_greedy_and_huge_logits_do_not_overflow() -> None:
    logits = np.array([1e30, -1e30, 0.5e30, 1e30], np.float32)
    assert set(frequencies(Sampling(seed=0, temperature=1e-30), logits, 50)) == {0}
    assert set(frequencies(Sampling(seed=0, temperature=2e-5), logits, 200)) == {0, 3}
    assert set(frequencies(Sampling(seed=0, temperature=2e-5, top_p=0.9), logits, 200)) == {0, 3}


def test_the_last_number_below_1_still_finds_a_token() -> None:
    """Rounding may carry it past the sum of all weights."""
    rows, last = 300, np.nextafter(1.0, 0.0)
    scores = some_logits(rows)
    scores[:, 150:] = -np.inf
    peaks, temperature = scores.max(axis=1), np.ones(rows, np.float32)
    whole = Truncation(np.zeros(rows, np.int64), np.full(rows, 0.9), np.zeros(rows), np.ones(rows))
    for token_ids in (
        draw(scores, temperature, np.full(rows, last)),
        draw_truncated(scores, peaks, temperature, whole, np.full(rows, last)),
    ):
        assert np.isfinite(scores[np.arange(rows), token_ids]).all()


REPETITION, PRESENCE, FREQUENCY = {"repetition_penalty": 2.0}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.2}


@pytest.mark.parametrize(
    ("logits", "penalty", "prompt", "completion", "best"),
    [
        ((1.0, 0.6), REPETITION, (0,), (), 1),
        ((-1.0, -1.5), REPETITION, (0,), (), 1),
        ((1.0, 0.4), REPETITION, (0, 0), (0, 0), 0),  # once, however often
        ((1.0, 0.6), PRESENCE, (), (0, 0), 1),
        ((1.0, 0.4), PRESENCE, (), (0, 0), 0),
        ((1.0, 0.9), {**PRESENCE, "repetition_penalty": 1.001}, (0,), (), 0),  # of the completion alone
        ((1.0, 0.5), FREQUENCY, (0, 0, 0), (0, 0), 0),
        ((1.0, 0.5), FREQUENCY, (), (0, 0, 0), 1),
    ],
)
def test_what_was_seen_is_penalised_as_defined(
    logits: tuple[float, ...], penalty: dict[str, Any], prompt: tuple[int, ...], completion: tuple[int, ...], best: int
) -> None:
    sampler = Sampler(2, 1)
    put(sampler, 0, Sampling(seed=0, temperature=0, **penalty), prompt=prompt, completion=completion)
    assert sampler.draw(np.array([logits], np.float32)).token_ids[0] == best


# Row by row ------------------------------------------------------------------------------------------------------------------------------


def walk(order: list[int], steps: int, vocab: int) -> dict[int, list[tuple[int, Any]]]:
    """These manners side by side for some steps; what each drew, by its number."""
    sampler = Sampler(vocab, len(order))
    for row, at in enumerate(order):
        put(sampler, row, MANNERS[at], prompt=range(at), top_logprobs=at % 4 if at % 3 else None)
    drawn: dict[int, list[tuple[int, Any]]] = {at: [] for at in order}
    for step in range(steps):
        logits = np.stack([some_logits(1, seed=100 * at + step, vocab=vocab)[0] for at in order])
        result = sampler.draw(logits)
        for row, at in enumerate(order):
            drawn[at].append((int(result.token_ids[row]), result.logprobs.get(row)))
    return drawn


@pytest.mark.parametrize("vocab", [V, 256, 4098, 4099])
def test_a_row_draws_the_same_alone_and_in_any_company(vocab: int) -> None:
    """To the bit, log-probabilities included."""
    everyone = list(range(len(MANNERS)))
    together = walk(everyone, 6, vocab)
    shuffled = np.random.default_rng(1).permutation(everyone).tolist()
    assert walk(shuffled, 6, vocab) == together
    assert walk([*shuffled[8:], shuffled[0]], 6, vocab) == {at: together[at] for at in [*shuffled[8:], shuffled[0]]}
    for at in everyone:
        assert walk([at], 6, vocab) == {at: together[at]}


def test_a_seed_gives_the_tokens_of_its_version() -> None:
    """Runs that are stored are computed again after an update. Other tokens need another SAMPLER_VERSION, and then other ones here."""
    drawn = walk(list(range(len(MANNERS))), 6, V)
    tokens = [token_id for at in sorted(drawn) for token_id, _ in drawn[at]]
    assert SAMPLER_VERSION == 3
    assert hashlib.sha256(np.array(tokens, "<i4").tobytes()).hexdigest()[:16] == "f4fbef732248d56c"


@pytest.mark.parametrize("sampling", MANNERS, ids=lambda sampling: f"seed{sampling.seed}")
def test_a_row_goes_on_in_another_sampler_from_what_it_has_drawn(sampling: Sampling) -> None:
    logits = some_logits(8, seed=3)
    here, there = Sampler(V, 1), Sampler(V, 3)
    put(here, 0, sampling, prompt=(1, 2, 2), top_logprobs=2)
    first = [int(here.draw(row[None]).token_ids[0]) for row in logits[:4]]
    rest = [int(here.draw(row[None]).token_ids[0]) for row in logits[4:]]
    put(there, 0, MANNERS[10], prompt=(5,))
    put(there, 1, MANNERS[3], prompt=(5,))
    put(there, 2, sampling, prompt=(1, 2, 2), completion=first, top_logprobs=2)
    there.move(2, 1)
    again = [there.draw(np.stack([row, row])) for row in logits[4:]]
    assert [int(drawn.token_ids[1]) for drawn in again] == rest
    assert all(drawn.logprobs.keys() == {1} for drawn in again)


def drawn_ahead(sampler: Sampler, logits: NDArray[np.float32], parts: int) -> None:
    """Draw the next tokens as an engine does: right after the logits of each part of the rows."""
    ends = [len(logits) * part // parts for part in range(parts + 1)]
    if sampler.begin_ahead(len(logits)):
        for begin, end in itertools.pairwise(ends):
            sampler.ahead(logits)(slice(begin, end))()


@pytest.mark.parametrize("vocab", [V, 256])
def test_what_is_drawn_ahead_is_what_would_be_drawn(vocab: int) -> None:
    """To the bit, in parts of any size, with masks and bans that become known only then, after rows have joined, moved and left."""
    picked, n_slots = np.random.default_rng(0), 6
    samplers = ahead, _ = Sampler(vocab, n_slots), Sampler(vocab, n_slots)
    following: list[NDArray[np.float32]] = []  # the logits of each row's next token
    for step in range(200):
        while len(following) < n_slots and (not following or picked.random() < 0.3):
            asked = dataclasses.replace(MANNERS[picked.integers(len(MANNERS))], seed=step)
            for each in samplers:
                put(each, len(following), asked, prompt=(1, 2), top_logprobs=1 if step % 4 == 0 else None)
            following.append(some_logits(1, seed=step, vocab=vocab)[0])
        logits = np.stack(following)
        masks = {0: words(31, 32, 41, vocab=vocab)} if picked.random() < 0.2 else {}
        banned = [(int(row.argmax()),) if picked.random() < 0.05 else () for row in logits]
        drawn, wanted = (each.draw(logits, masks=masks, banned=banned) for each in samplers)
        assert drawn.token_ids.tolist() == wanted.token_ids.tolist()
        assert drawn.logprobs == wanted.logprobs
        if picked.random() < 0.2:
            only = picked.random(len(logits)) < 0.5
            drawn, wanted = (each.draw(logits, only=only) for each in samplers)
            assert drawn.token_ids[only].tolist() == wanted.token_ids[only].tolist()
        following = list(some_logits(len(logits), seed=step, vocab=vocab))
        if picked.random() < 0.8:
            drawn_ahead(ahead, np.stack(following), parts=int(picked.integers(1, 1 + min(3, len(following)))))
        if picked.random() < 0.2:
            left, last = int(picked.integers(len(following))), following.pop()
            if left < len(following):
                following[left] = last
                for each in samplers:
                    each.move(len(following), left)


def test_what_was_drawn_ahead_is_not_drawn_again() -> None:
    logits, sampler = some_logits(3), Sampler(V, 3)
    for row in range(3):
        put(sampler, row, Sampling(seed=row), prompt=(1,), top_logprobs=0)
    drawn_ahead(sampler, logits, parts=2)
    known = sampler.draw(np.roll(logits, 1, axis=1)).token_ids
    for row in range(3):
        alone = Sampler(V, 1)
        put(alone, 0, Sampling(seed=row), prompt=(1,))
        assert known[row] == alone.draw(logits[row : row + 1]).token_ids[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_finite_logits_fails_alone_when_it_was_drawn_ahead(bad: float) -> None:
    logits, sampler = some_logits(3), Sampler(V, 3)
    logits[1] = bad
    for row in range(3):
        put(sampler, row, Sampling(seed=row), prompt=(1,))
    first = sampler.draw(some_logits(3, seed=1)).token_ids
    drawn_ahead(sampler, logits, parts=1)
    drawn = sampler.draw(logits)
    assert isinstance(drawn.failures[1], RuntimeFailed)
    assert (list(drawn.failures), drawn.token_ids[1]) == ([1], -1)
    again = Sampler(V, 3)
    for row in range(3):
        put(again, row, Sampling(seed=row), prompt=(1,), completion=[int(first[row])])
    assert again.draw(logits).token_ids.tolist() == drawn.token_ids.tolist()


# Masks and bans --------------------------------------------------------------------------------------------------------------------------


def words(*allowed: int, vocab: int = V) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_a_mask_and_a_ban_concern_their_own_row_alone() -> None:
    logits = some_logits(4)
    sampler = Sampler(V, 4)
    for row in range(4):
        put(sampler, row, Sampling(seed=row, temperature=0 if row % 2 else 1.0), prompt=(1,))
    best = logits.argmax(axis=1)
    alone = Sampler(V, 1)
    put(alone, 0, Sampling(seed=2), prompt=(1,))
    drawn = sampler.draw(logits, masks={0: words(31, 32, 210)}, banned=((), (int(best[1]),), (), (int(best[0]),)))
    assert drawn.token_ids[0] in (31, 32, 210)
    assert drawn.token_ids[1] == np.argsort(logits[1])[-2]
    assert drawn.token_ids[2] == alone.draw(logits[2:3]).token_ids[0]
    assert drawn.token_ids[3] == best[3]
    assert (logits == some_logits(4)).all(), "the logits are the engine's"


@pytest.mark.parametrize("sampling", [MANNERS[0], MANNERS[1], MANNERS[9], MANNERS[10]])
def test_a_row_without_any_token_fails_alone_and_stays_where_it_was(sampling: Sampling) -> None:
    logits = some_logits(3)
    logits[2, 5] = np.nan
    sampler, other = Sampler(V, 3), Sampler(V, 3)
    for each in (sampler, other):
        for row in range(3):
            put(each, row, sampling, prompt=(1,), top_logprobs=1)
    drawn = sampler.draw(logits, masks={0: words()})
    assert (drawn.token_ids[0], drawn.token_ids[2]) == (-1, -1)
    first = other.draw(some_logits(3)).token_ids
    assert drawn.token_ids[1] == first[1]
    assert isinstance(drawn.failures[0], InvalidRequest)
    assert "position 1" in str(drawn.failures[0])
    assert isinstance(drawn.failures[2], RuntimeFailed)
    assert drawn.logprobs.keys() == {1}
    again = sampler.draw(some_logits(3)).token_ids
    assert (again[0], again[2]) == (first[0], first[2])
    assert again[1] == other.draw(some_logits(3)).token_ids[1]


def test_rows_that_do_not_always_draw_together_have_their_own_random_numbers() -> None:
    """For more draws than random numbers are computed together."""
    logits, n_drawn, sampler = some_logits(3), [0, 0, 0], Sampler(V, 3)
    for row in range(3):
        put(sampler, row, Sampling(seed=row), prompt=(1,))
    for step in range(4 * UniformCache.BLOCK):
        only = None if step % 3 else np.array([step % 2 == 0, step % 5 == 0, True])
        drawn = sampler.draw(logits, only=only).token_ids
        for row in range(3) if only is None else np.flatnonzero(only).tolist():
            alone = Sampler(V, 1)
            put(alone, 0, Sampling(seed=row), prompt=(1,), completion=[1] * n_drawn[row])
            assert drawn[row] == alone.draw(logits[row : row + 1]).token_ids[0]
            n_drawn[row] += 1


@pytest.mark.parametrize(
    ("fields", "banned", "masks", "param"),
    [
        ({"allowed_token_ids": (5,)}, (5,), {}, "allowed_token_ids"),
        ({"allowed_token_ids": (5,), "logit_bias": {5: -100.0}}, (5,), {}, "allowed_token_ids"),
        ({"allowed_token_ids": (5,)}, (), {0: words(6)}, "allowed_token_ids"),
        ({}, (5,), {0: words(5)}, "min_tokens"),
        ({"logit_bias": {5: 100.0}}, range(V), {}, "min_tokens"),
        ({}, (), {0: words()}, None),  # the grammar alone
    ],
)
def test_a_contradiction_names_one_of_the_fields_that_make_it(fields: Any, banned: Any, masks: Any, param: str | None) -> None:
    sampler = Sampler(V, 2)
    for row in range(2):
        put(sampler, row, Sampling(seed=0, **(fields if row == 0 else {})), prompt=(1,))
    failures = sampler.draw(some_logits(2), masks=masks, banned=(banned, ())).failures
    assert {row: failure.param for row, failure in failures.items()} == {0: param}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_fail_even_where_they_are_masked_away(bad: float) -> None:
    logits = some_logits(1)
    logits[0, 7] = bad
    sampler = Sampler(V, 1)
    put(sampler, 0, Sampling(seed=0, top_p=0.9), prompt=(1,))
    assert isinstance(sampler.draw(logits, banned=((7,),)).failures[0], RuntimeFailed)


# Log-probabilities -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_top", [0, 20])
@pytest.mark.parametrize("vocab", [10, 4099])
def test_log_probabilities_are_those_of_the_model_before_anything_else(n_top: int, vocab: int) -> None:
    logits = some_logits(2, vocab=vocab)
    sampler = Sampler(vocab, 2)
    put(sampler, 0, Sampling(seed=1, temperature=0, logit_bias={4: 100.0}), prompt=(1,), top_logprobs=n_top)
    put(sampler, 1, Sampling(seed=1), prompt=(1,))
    told = sampler.draw(logits).logprobs
    assert told.keys() == {0}
    exact = logits[0].astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    assert told[0].token_id == 4
    assert told[0].logprob == pytest.approx(exact[4], abs=FLOAT32 * 10)
    best = np.argsort(-exact, kind="stable")[:n_top]
    assert [token for token, _ in told[0].top] == best.tolist()
    assert [logprob for _, logprob in told[0].top] == pytest.approx(exact[best], abs=FLOAT32 * 10)


def test_log_probabilities_of_a_prompt() -> None:
    logits = some_logits(3)
    logits[1, 9] = -np.inf
    told = list(logprobs_of(logits, [8, 9, 10], 2))
    assert [one.token_id for one in told] == [8, 9, 10]
    assert told[1].logprob == -math.inf
    assert all(len(one.top) == 2 and one.top[0][1] >= one.top[1][1] for one in told)
    logits[2, 0] = np.nan
    with pytest.raises(RuntimeFailed, match="not finite"):
        logprobs_of(logits, [8, 9, 10], 2)


def test_log_probabilities_of_a_prompt_are_kept_in_arrays_and_looked_at_one_by_one() -> None:
    logits, n_top = some_logits(200, vocab=4099), 20
    logits[7, : 4099 - 5] = -np.inf
    token_ids = list(range(4099 - 5 - 195, 4099 - 5)) + [4098] * 5
    told = PromptLogprobs([None], logprobs_of(logits, token_ids, n_top))
    sampler = Sampler(4099, 1)
    for row in (0, 7, 64, 199):
        put(sampler, 0, Sampling(seed=0, temperature=0), prompt=(1,), top_logprobs=n_top)
        of_draw = sampler.draw(logits[row : row + 1]).logprobs[0]
        entry = list(told)[row + 1]
        assert entry is not None
        assert entry.top == of_draw.top, "the same to the bit as of a token that is drawn"
        assert len(entry.top) == (5 if row == 7 else n_top)
    again = PromptLogprobs(told)
    told.extend([TokenLogprob(3, -1.0)])
    assert (len(told), len(again)) == (202, 201)
    assert list(told) == [*again, TokenLogprob(3, -1.0)]
    arrays = [getattr(part, name) for part in again.parts if isinstance(part, Told) for name in Told.__slots__]
    assert sum(array.nbytes for array in arrays) <= 200 * (8 * n_top + 24)
    assert all(array.base is None or array.base.nbytes <= 2 * array.nbytes for array in arrays), "no view keeps the rest of a table"


def test_the_rank_of_a_token_is_one_more_than_how_many_are_likelier() -> None:
    """Whether it is among the likeliest that are told or not, and in however many pieces the rows are worked on."""
    rows, vocab = 200, 4099
    logits = some_logits(rows, vocab=vocab)
    logits[:, 7] = logits[:, 8]
    logits[0, 3] = -np.inf
    token_ids = [3, 7, 8, *range(3, rows - 1), int(logits[-1].argmax())]
    for n_top in (0, 2):
        ranks = [told.rank for told in logprobs_of(logits, token_ids, n_top)]
        assert ranks == [1 + sum(logits[row] > logits[row, token_id]) for row, token_id in enumerate(token_ids)]
        assert (ranks[0], ranks[-1]) == (vocab, 1)


# Refusals --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("typical_p", 2.0),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", 1e39),
        ("temperature", 1e39),
        ("top_k", 2**63),
        ("top_k", 1.5),
        ("top_p", None),
        ("seed", -1),
        ("seed", 2**64),
        ("logit_bias", {V: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("allowed_token_ids", (-1,)),
    ],
)
def test_what_no_model_can_be_asked_for_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_sampling(Sampling(**{"seed": 0, param: value}), V)
    assert refused.value.param == param


_NUMBERS = st.one_of(st.floats(), st.integers(-(2**65), 2**65), st.sampled_from([0.0, 1e-45, 5e-324, 1e-6, 1.0, 100.0, 2**31 - 1, 2**63]))


@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            **{name: _NUMBERS | st.floats(0, 1) for name in ("temperature", "top_p", "min_p", "typical_p")},
            **{name: _NUMBERS | st.floats(-2, 2) for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")},
            "top_k": _NUMBERS | st.integers(0, 400),
            "seed": _NUMBERS,
            "logit_bias": st.dictionaries(st.integers(-2, V + 1), _NUMBERS | st.floats(-100, 100), max_size=3),
            "allowed_token_ids": st.lists(st.integers(-1, V) | st.integers(-(2**65), 2**65), max_size=3).map(tuple),
        },
    )
)
@settings(deadline=None, max_examples=150)
def test_nothing_that_is_accepted_fails_in_a_draw(fields: dict[str, Any]) -> None:
    """Neither the row that asked for it nor the ones beside it, in three steps."""
    sampling = Sampling(**{"seed": 1, **fields})
    try:
        check_sampling(sampling, V)
    except InvalidRequest:
        return
    sampler, alone = Sampler(V, 2), Sampler(V, 1)
    put(sampler, 0, sampling, prompt=(1, 2, 2))
    for each, row in ((sampler, 1), (alone, 0)):
        put(each, row, MANNERS[1], prompt=(1,))
    for step in range(3):
        logits = some_logits(2, seed=step)
        drawn = sampler.draw(logits)
        assert not drawn.failures
        assert drawn.token_ids[1] == alone.draw(logits[1:]).token_ids[0]
