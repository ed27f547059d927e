"""Guessed tokens make a run faster and change nothing that it says, keeps or stores."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from service.generation.request import Delta, GenerationRequest, Sampling
from service.generation.sampling import guesses
from service.generation.sampling.guesses import Guesses, Worth
from tests.service.fakes import first
from tests.service.generation.fake_steps import FakeSteps
from tests.service.generation.test_engine import all_of, ask, running
from tests.service.generation.test_keeping import keeping

PENALISED = Sampling(seed=0, temperature=0, repetition_penalty=1.02, presence_penalty=0.01)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess whether or not it pays, because the time of a step is no fact of a test."""
    monkeypatch.setattr(Worth, "pays", lambda *_: True)


async def answers(steps: FakeSteps, tokenizer: Path, requests: list[GenerationRequest]) -> tuple[list[Delta], float, float]:
    """What the runs say, in few slots, and how many tokens were guessed, and were right."""
    async with running(steps, tokenizer, slots=5) as engine:
        runs = [engine.submit(request) for request in requests]
        said = [await all_of(run) for run in runs]
        return said, engine.metrics.guessed_tokens._value.get(), engine.metrics.right_guesses._value.get()


async def test_runs_say_the_same_with_guesses_and_without(steps: FakeSteps, tokenizer: Path) -> None:
    kinds: list[dict[str, Any]] = [{}, {"top_logprobs": 2}, {"sampling": PENALISED}, {"min_tokens": 30}, {"sampling": Sampling(seed=3)}]
    requests = [ask(at, at + 1, max_tokens=20 + 7 * at, **kinds[at % len(kinds)]) for at in range(1, 16)]
    plain = FakeSteps()
    plain.decoder = plain.decoder.model_copy(update={"exact": False})  # for which nothing is guessed
    unguessed, none, _ = await answers(plain, tokenizer, requests)
    # Stop strings that runs meet somewhere in their text.
    stopping = [replace(request, stop=(said.text[15:18],)) for request, said in zip(requests, unguessed, strict=True)]
    stopped, _, _ = await answers(plain, tokenizer, stopping)
    said, guessed, right = await answers(steps, tokenizer, requests + stopping)
    assert said == unguessed + stopped
    assert none == 0
    assert guessed > right > 200, "some guesses are wrong"
    assert len(steps.calls) < len(plain.calls)


@pytest.mark.parametrize("n", first(2, [14, 23, 17, 20, 26, 29]))
async def test_kept_and_cached_states_are_those_of_the_drawn_tokens(steps: FakeSteps, tokenizer: Path, n: int) -> None:
    async with keeping(steps, tokenizer, cache_bytes=2**20) as kept:
        first, state = await kept.run(1, 2, max_tokens=n)
        more, _ = await kept.run(9, start=state, max_tokens=20)
        again = await all_of(kept.engine.submit(ask(1, 2, *first.token_ids, 9, max_tokens=20)))
    assert list(first.token_ids) == steps.expected((1, 2), n)
    assert more.token_ids == again.token_ids
    assert list(again.token_ids) == steps.expected((1, 2, *first.token_ids, 9), 20)


async def test_guesses_stay_within_the_positions_of_the_model(tokenizer: Path) -> None:
    steps = FakeSteps(n_positions=40)  # the session refuses to feed more
    async with running(steps, tokenizer) as engine:
        said = [await all_of(engine.submit(ask(first, first + 1, max_tokens=99))) for first in (1, 2)]
    assert [list(each.token_ids) for each in said] == [steps.expected((first, first + 1), 39) for first in (1, 2)]


def test_a_guess_is_what_followed_the_last_time() -> None:
    run = Guesses([1, 2, 3, 4, 5, 1, 2, 3, 6, 7])
    assert run.propose(3) == []
    for token in (1, 2, 3):
        run.add(token)
    assert run.propose(3) == [6, 7, 1]
    for token in (6, 7, 8):
        run.add(token)
    assert run.right == pytest.approx(0.8 + 0.2 * 2)


def test_the_places_of_a_run_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "MOST_PLACES", 10)
    run = Guesses(range(1000, 2000))
    for token in range(100):
        run.add(token)
    assert len(run._places) == 10
    for token in (50, 51, 52):
        run.add(token)
    assert run.propose(3) == [], "too far back"


def test_guesses_are_used_only_while_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    worth = Worth()
    assert not worth.pays(8, 24.0), "first a step without them, for comparison"
    worth.took(8, 1.0, guessing=False)
    assert worth.pays(8, 0.1), "then one with them"
    worth.took(8, 2.0, guessing=True)
    assert worth.pays(8, 12.0)  # 20 tokens in 2 s
    decisions = [worth.pays(8, 8.0) for _ in range(200)]  # 16 tokens in 2 s, and the margin
    assert not any(decisions[:90])
    assert any(decisions), "the cost is measured again"
    assert sum(now != then for then, now in pairwise(decisions)) >= 1
