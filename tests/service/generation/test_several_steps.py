"""Several steps made by one call change nothing that a run says, keeps or stores."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import contract
from service.errors import RuntimeFailed
from service.generation.decoding import Decoding
from service.generation.request import Delta, GenerationRequest, Sampling
from service.generation.running import MOST_STEPS
from service.generation.sequence import Sequence
from service.generation.session import MUCH_TO_FOLLOW, OnnxStepSession, Step
from tests.service.fakes import PATIENCE_S, first
from tests.service.generation import real_engine
from tests.service.generation.fake_steps import EOS, FakeSteps
from tests.service.generation.test_engine import all_of, ask, running
from tests.service.generation.test_keeping import keeping

WARM = Sampling(seed=3)
KINDS: list[dict[str, Any]] = [
    {"sampling": WARM},
    {"sampling": Sampling(seed=4, temperature=0.5), "top_logprobs": 2},
    {},  # greedy: some of its tokens are guessed
    {"sampling": Sampling(seed=5, logit_bias={EOS: 4.0})},  # ends anywhere; its logits are edited
    {"sampling": Sampling(seed=6, temperature=3.0)},
    {"sampling": Sampling(seed=7, top_p=0.8)},
    {"sampling": Sampling(seed=8), "min_tokens": 9},
]


class Counted(FakeSteps):
    """Counts its calls by their numbers of steps. Its end token comes as often as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = Counter[int]()
        self.unembedding[:, EOS] = self.unembedding[:, 7]

    def bind(self, *steps: Step) -> Callable[[], None]:
        call = super().bind(*steps)

        def counted() -> None:
            self.steps[len(steps)] += 1
            call()

        return counted


async def answers(steps: FakeSteps, tokenizer: Path, requests: list[GenerationRequest], hand_over_s: float) -> list[Delta]:
    async with running(steps, tokenizer, slots=4, hand_over_s=hand_over_s) as engine:
        runs = [engine.submit(request) for request in requests]
        return await asyncio.gather(*map(all_of, runs))


@pytest.mark.parametrize("kind", first(3, [None, 3, 6, 0, 1, 2, 4, 5]))
async def test_runs_say_the_same(tokenizer: Path, kind: int | None) -> None:
    """Of one kind, and of all kinds together; with end tokens and stop strings between two steps of a call."""
    of = [KINDS[at % len(KINDS) if kind is None else kind] for at in range(24)]
    requests = [ask(at, at + 1, max_tokens=10 + 3 * at, **{**options}) for at, options in enumerate(of, 1)]
    plain, several = Counted(), Counted()
    wanted = await answers(plain, tokenizer, requests, 0)
    stopping = [replace(request, stop=(said.text[5:7],)) for request, said in zip(requests, wanted, strict=True) if len(said.text) > 7]
    wanted += await answers(plain, tokenizer, stopping, 0)
    assert await answers(several, tokenizer, [*requests, *stopping], PATIENCE_S) == wanted
    assert {said.finish_reason for said in wanted} == {"length", "stop"}
    assert set(plain.steps) == {1}
    if kind in (3, 5):  # where tokens cannot be drawn ahead
        assert set(several.steps) == {1}
    else:
        assert several.steps[MOST_STEPS] > 10


async def new_tokens(tokenizer: Path, asked: GenerationRequest) -> list[int]:
    """The tokens of a run of which none came before in it: each can end it at its own place."""
    (said,) = await answers(Counted(), tokenizer, [asked], 0)
    return [token for at, token in enumerate(said.token_ids) if token not in said.token_ids[:at]]


async def test_a_run_alone_ends_at_any_step_of_a_call_and_another_begins(tokenizer: Path) -> None:
    long = ask(1, 2, max_tokens=200, sampling=WARM, ignore_eos=True)
    wanted, steps = await answers(Counted(), tokenizer, [long], 0), Counted()
    async with running(steps, tokenizer, hand_over_s=PATIENCE_S) as engine:
        for token in (await new_tokens(tokenizer, long))[:20]:
            ended = await all_of(engine.submit(replace(long, stop_token_ids=(token,))))
            assert ended.token_ids == wanted[0].token_ids[: wanted[0].token_ids.index(token) + 1]
        assert [await all_of(engine.submit(long))] == wanted
    assert steps.steps[MOST_STEPS] > 50


@pytest.mark.parametrize("at", first(3, [3, 6, 11, *range(4, 11)]))
async def test_kept_and_cached_states_are_those_of_the_tokens(tokenizer: Path, at: int) -> None:
    """Also beside runs that end at other steps of a call."""
    asked: dict[str, Any] = {"sampling": WARM, "ignore_eos": True, "max_tokens": 30}
    asked["stop_token_ids"] = ((await new_tokens(tokenizer, ask(1, 2, **asked)))[at],)
    async with keeping(Counted(), tokenizer) as kept:
        first, state = await kept.run(1, 2, **asked)
        more, _ = await kept.run(9, start=state, max_tokens=20, sampling=WARM)
    steps = Counted()
    async with keeping(steps, tokenizer, cache_bytes=2**20, hand_over_s=PATIENCE_S) as kept:
        others = [kept.engine.submit(ask(prompt, max_tokens=3 + prompt, sampling=WARM)) for prompt in range(3, 8)]
        said, state = await kept.run(1, 2, **asked)
        went_on, _ = await kept.run(9, start=state, max_tokens=20, sampling=WARM)
        again = await all_of(kept.engine.submit(ask(1, 2, *said.token_ids, 9, max_tokens=20, sampling=WARM)))
        for other in others:
            await all_of(other)
    assert said == first
    assert went_on == more
    assert again.token_ids == more.token_ids
    assert steps.steps[MOST_STEPS] > 0


async def test_a_run_with_bad_logits_fails_after_its_good_tokens_and_the_others_go_on(tokenizer: Path) -> None:
    requests = [ask(at, max_tokens=40, sampling=WARM, ignore_eos=True) for at in (1, 2, 3)]
    wanted = await answers(Counted(), tokenizer, requests, 0)
    steps = Counted()
    bad = next(
        token for at, token in enumerate(wanted[0].token_ids) if at > 12 and token not in {*wanted[1].token_ids, *wanted[2].token_ids}
    )
    steps.bad_tokens.add(bad)
    async with running(steps, tokenizer, hand_over_s=PATIENCE_S) as engine:
        runs = [engine.submit(request) for request in requests]
        said: list[int] = []

        async def read() -> None:
            async for delta in runs[0]:
                said.extend(delta.token_ids)

        with pytest.raises(RuntimeFailed):
            await read()
        assert [await all_of(run) for run in runs[1:]] == wanted[1:]
    assert said == list(wanted[0].token_ids[: wanted[0].token_ids.index(bad) + 1])
    assert steps.steps[MOST_STEPS] > 0


async def test_runs_with_huge_logits_say_the_same(tokenizer: Path) -> None:
    """Their products with the inverse temperature exceed float32."""
    said = []
    for hand_over_s in (0.0, PATIENCE_S):
        steps = Counted()
        steps.unembedding *= np.float32(1e30)
        steps.decoder = steps.decoder.model_copy(update={"exact": False})  # for which nothing is guessed
        requests = [ask(at, max_tokens=30, sampling=Sampling(seed=at, temperature=at % 2), ignore_eos=True) for at in range(1, 4)]
        said.append(await answers(steps, tokenizer, requests, hand_over_s))
    assert said[0] == said[1]


@pytest.mark.parametrize("at", first(2, [0, 3, 1, 2]))
async def test_a_step_that_fails_among_several_ends_its_runs_and_later_ones_are_right(tokenizer: Path, at: int) -> None:
    asked = ask(1, 2, max_tokens=30, sampling=WARM, ignore_eos=True)
    wanted = await answers(Counted(), tokenizer, [asked], 0)
    steps = Counted()
    async with running(steps, tokenizer, hand_over_s=PATIENCE_S) as engine:
        assert [await all_of(engine.submit(asked))] == wanted
        steps.failures[len(steps.calls) + 7 + at] = RuntimeError("no memory")
        steps.hold()  # until both are queued, or the first alone might be at that step
        runs = [engine.submit(asked), engine.submit(asked)]
        steps.open()
        for run in runs:
            with pytest.raises(RuntimeFailed):
                await all_of(run)
        assert [await all_of(engine.submit(asked))] == wanted


async def test_runs_that_are_preempted_say_the_same(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.generation.decoding._QUANTUM", (4, 4))
    held: list[Sequence] = []
    hold = Decoding.hold
    monkeypatch.setattr(Decoding, "hold", lambda decoding, sequence: (held.append(sequence), hold(decoding, sequence)))
    asked = [ask(at, max_tokens=40, sampling=WARM, ignore_eos=True, client=str(at % 3)) for at in range(1, 10)]
    plain, several = Counted(), Counted()
    wanted = await answers(plain, tokenizer, asked, 0)
    held.clear()
    assert await answers(several, tokenizer, asked, PATIENCE_S) == wanted
    assert len(held) > 5
    assert several.steps[MOST_STEPS] > 0


@pytest.mark.parametrize(
    ("threads", "slots", "much"),
    [(1, 3, 0), (2, 9, MUCH_TO_FOLLOW), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in [(2, 3, 0), (1, 9, 0), (2, 9, 0)])],
)
async def test_the_runtime_gives_the_same_bits(
    decoder_bundle: Path, threads: int, slots: int, much: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one core, and with rows divided between two, or only their draws; log-probabilities show the bits of the logits."""
    monkeypatch.setattr("service.generation.session.MUCH_TO_FOLLOW", much)
    manifest = contract.read_manifest(decoder_bundle)
    requests = [
        GenerationRequest(prompt=(at, 7), sampling=Sampling(seed=at, temperature=at % 3), max_tokens=20 + at, top_logprobs=1)
        for at in range(20)
    ]
    said, steps = [], Counter[int]()

    class Session(OnnxStepSession):
        def bind(self, *of_call: Step) -> Callable[[], None]:
            steps[len(of_call)] += 1
            return super().bind(*of_call)

    for hand_over_s in (0.0, PATIENCE_S):
        session = Session(decoder_bundle, manifest, threads=threads)
        async with real_engine.running(session, decoder_bundle, slots=slots, hand_over_s=hand_over_s) as engine:
            runs = [engine.submit(request) for request in requests]
            said.append([await all_of(run) for run in runs])
    assert said[0] == said[1]
    assert steps[MOST_STEPS] > 0
    assert np.mean([len(each.token_ids) for each in said[0]]) > 20
