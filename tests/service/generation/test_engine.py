"""Slots, the step loop and its callers together, over a decoder that can be held, broken and read."""

import asyncio
import dataclasses
import math
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.errors import DeadlineExceeded, InputTooLong, InvalidRequest, NotReady, RuntimeFailed
from service.generation import step_engine
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.request import Delta, GenerationRequest, Grammar, Sampling
from service.generation.run import Run, join
from service.generation.sampling.grammar import Grammars, Words
from service.generation.saved.keeper import StateKeeper
from service.generation.saved.shared_prefixes import SharedPrefixes
from service.generation.text import Vocabulary
from service.telemetry.metrics import GeneratorMetrics, Metrics
from tests.service.fakes import PATIENCE_S, set_forward, until
from tests.service.generation.fake_steps import EOS, VOCAB_SIZE, FakeSteps, GatedSteps, timed_by_calls

GREEDY = Sampling(seed=0, temperature=0)
RANDOM = Sampling(seed=7, temperature=1.0, top_k=40, top_p=0.95, frequency_penalty=0.3)


@asynccontextmanager
async def running(
    steps: Any,
    tokenizer: Path,
    *,
    numerics: str = "0",
    keeper: StateKeeper | None = None,
    shared: SharedPrefixes | None = None,
    metrics: Metrics | None = None,
    **limits: Any,
) -> AsyncIterator[GeneratorEngine]:
    engine = GeneratorEngine(
        steps,
        Vocabulary(tokenizer),
        eos_token_ids=(EOS,),
        grammars=Grammars(tokenizer, (EOS,)),
        keeper=keeper,
        shared=shared,
        numerics=numerics,
        limits=GeneratorLimits(**{"max_wait_s": PATIENCE_S, "max_bulk_wait_s": PATIENCE_S, **limits}),  # else a slow machine would refuse
        metrics=GeneratorMetrics(metrics or Metrics(), "fake"),
    )
    with timed_by_calls(steps):
        engine.start()
        try:
            yield engine
        finally:
            if isinstance(steps, GatedSteps):
                steps.open()
            await engine.stop()


def ask(*prompt: int, **options: Any) -> GenerationRequest:
    return GenerationRequest(**{"prompt": prompt, "sampling": GREEDY, "max_tokens": 8, **options})


async def all_of(run: Run) -> Delta:
    """Everything the run gives, as one delta."""
    deltas = [delta async for delta in run]
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return join(deltas)


async def tokens_of(run: Run) -> list[int]:
    return list((await all_of(run)).token_ids)


async def begun(steps: FakeSteps, calls: int) -> None:
    await asyncio.to_thread(steps.wait, calls)


# Tokens ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [(5,), (5, 6, 7), tuple(range(1, 290)) * 9])
async def test_a_run_continues_its_prompt_as_the_plain_loop_does(steps: FakeSteps, tokenizer: Path, prompt: tuple[int, ...]) -> None:
    async with running(steps, tokenizer) as engine:
        run = engine.submit(ask(*prompt, max_tokens=12))
        answer = await all_of(run)
    assert list(answer.token_ids) == steps.expected(prompt, 12)
    assert answer.finish_reason == "length"
    assert (run.usage.prompt_tokens, run.usage.completion_tokens) == (len(prompt), 12)


async def test_tokens_are_handed_over_together_but_the_first_and_the_last_at_once(
    steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over: list[int] = []
    deliver = step_engine._deliver
    monkeypatch.setattr(step_engine, "_deliver", lambda emitted: (handed_over.append(len(emitted)), deliver(emitted)))
    async with running(steps, tokenizer, hand_over_s=PATIENCE_S) as engine:
        for _ in range(2):  # at first, the engine does not know how long a step takes, and hands over every token
            handed_over.clear()
            assert await tokens_of(engine.submit(ask(5, 6, max_tokens=12))) == steps.expected((5, 6), 12)
    assert handed_over == [1, 11]


async def test_many_runs_share_steps_and_none_sees_the_others(steps: FakeSteps, tokenizer: Path) -> None:
    prompts = [tuple(range(first, first + size)) for first, size in zip(range(1, 41), [1, 7, 30, 2] * 10, strict=True)]
    async with running(steps, tokenizer, slots=8) as engine:
        runs = [engine.submit(ask(*prompt, max_tokens=3 + at % 5)) for at, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*map(tokens_of, runs))
    assert answers == [steps.expected(prompt, 3 + at % 5) for at, prompt in enumerate(prompts)]
    assert max(map(len, steps.calls)) == 8, "all slots in one step"
    assert len(steps.calls) < sum(map(len, answers)), "steps were shared"


@pytest.mark.parametrize(("prompt", "drawn"), [(range(1, 6), 6), (range(1, 11), 1), (range(1, 4), 8)])
async def test_a_run_ends_where_positions_end(tokenizer: Path, prompt: range, drawn: int) -> None:
    """The last token drawn is not fed. A run that asks for less is not touched."""
    steps = FakeSteps(n_positions=10)
    async with running(steps, tokenizer) as engine:
        answer = await all_of(engine.submit(ask(*prompt, max_tokens=8)))
    assert (list(answer.token_ids), answer.finish_reason) == (steps.expected(prompt, drawn), "length")


# Ends ------------------------------------------------------------------------------------------------------------------------------------


async def test_an_end_token_ends_the_run_unless_it_is_to_be_ignored(steps: FakeSteps, tokenizer: Path) -> None:
    towards_end = Sampling(seed=0, temperature=0, logit_bias={EOS: 100})
    async with running(steps, tokenizer) as engine:
        ended = await all_of(engine.submit(ask(1, sampling=towards_end)))
        ignored = await all_of(engine.submit(ask(1, sampling=towards_end, ignore_eos=True, max_tokens=3)))
        later = await all_of(engine.submit(ask(1, sampling=towards_end, min_tokens=4)))
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ((EOS,), "stop", None)
    assert (ignored.token_ids, ignored.finish_reason) == ((EOS,) * 3, "length")
    assert EOS not in later.token_ids[:4]
    assert later.token_ids[4:] == (EOS,)


class SlowMasks:
    """In place of the library's: every mask allows each third token after the last one, and is held if so many tokens were drawn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held_at: float = math.inf  # number of drawn tokens
        self.asked = 0

    def hold(self, at: float) -> None:
        with self._changed:
            self._held_at = at
            self._changed.notify_all()

    def open(self) -> None:
        self.hold(math.inf)

    def wait(self, drawn: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: drawn < self._held_at, PATIENCE_S)

    def matcher(self, grammar: Grammar) -> "SlowMatcher":
        return SlowMatcher(self)


class SlowMatcher:
    finished = False
    failure: str | None = None

    def __init__(self, masks: SlowMasks) -> None:
        self._masks = masks
        self._completion: list[int] = []

    def advance(self, *token_ids: int) -> None:
        self._completion += token_ids

    def mask(self, out: Words) -> None:
        self._masks.asked += 1
        drawn = len(self._completion)
        self._masks.wait(drawn)
        assert drawn == len(self._completion), "nothing is drawn while a mask is computed"
        if len(self._completion) == 20:
            self.failure = "it has come to where no token fits"
            return
        bits = np.zeros(32 * len(out), np.bool_)
        bits[1 + sum(self._completion) % 3 : VOCAB_SIZE : 3] = True
        out[:] = np.packbits(bits, bitorder="little").view(np.int32)


async def test_slow_masks_hold_up_their_own_runs_alone_and_change_no_token(
    steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = SlowMasks()
    asked = [
        ask(1 + at, sampling=dataclasses.replace(RANDOM, seed=at), max_tokens=12, grammar=Grammar(kind="regex", source="a"))
        for at in range(3)
    ]
    async with running(steps, tokenizer, slots=5) as engine:
        monkeypatch.setattr(engine, "_grammars", masks)
        alone = [await tokens_of(engine.submit(request)) for request in asked]
        masks.hold(0)
        slow = [engine.submit(request) for request in asked]
        other = ask(9, sampling=RANDOM, max_tokens=60)
        first = await tokens_of(engine.submit(other))  # comes to its end although no mask is there
        assert not any(run.usage.completion_tokens for run in slow)
        masks.hold(4)  # in the midst of them
        beside = engine.submit(dataclasses.replace(other, max_tokens=100_000))
        await anext(beside)
        read = [anext(run) for run in slow]
        begun_with = [list(delta.token_ids) for delta in await asyncio.gather(*read)]
        seen = beside.usage.completion_tokens
        await until(lambda: beside.usage.completion_tokens > seen + 50)
        masks.open()
        rest = await asyncio.gather(*map(tokens_of, slow))
        beside.cancel()
        again = await tokens_of(engine.submit(other))
    assert [start + end for start, end in zip(begun_with, rest, strict=True)] == alone
    assert first == again
    assert masks.asked >= 2 * 3 * 12


async def test_a_run_whose_grammar_leaves_no_token_is_told_why_and_ends_alone(
    steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = SlowMasks()
    async with running(steps, tokenizer) as engine:
        monkeypatch.setattr(engine, "_grammars", masks)
        run = engine.submit(ask(1, max_tokens=40, grammar=Grammar(kind="regex", source="a")))
        other = engine.submit(ask(5, 6, max_tokens=40))
        assert await tokens_of(other) == steps.expected((5, 6), 40)
        with pytest.raises(InvalidRequest, match="grammar cannot be followed any further: it has come to where no token fits"):
            await all_of(run)
    assert run.usage.completion_tokens == 20


# Leaving ---------------------------------------------------------------------------------------------------------------------------------


async def test_a_run_that_is_left_frees_its_slot_within_one_step(steps: FakeSteps, tokenizer: Path) -> None:
    async with running(steps, tokenizer, slots=1) as engine:
        steps.hold()
        async with engine.submit(ask(1, max_tokens=10_000)) as run:
            second = engine.submit(ask(2, max_tokens=2))
            steps.release(3)
            await begun(steps, 4)
        assert run.cancelled
        steps.open()
        assert await tokens_of(second) == steps.expected((2,), 2)
    own = [call for call in steps.calls if call != [[2]]]
    assert len(own) <= 6, "the prompt, three steps, one under way when it was left"


async def test_a_run_that_is_cancelled_while_it_waits_never_runs(steps: FakeSteps, tokenizer: Path) -> None:
    async with running(steps, tokenizer, slots=1) as engine:
        steps.hold()
        first = engine.submit(ask(1, max_tokens=2))
        second = engine.submit(ask(250, max_tokens=2))
        second.cancel()
        steps.open()
        await tokens_of(first)
        assert [delta async for delta in second] == []
    assert [250] not in [row for call in steps.calls for row in call]


async def test_a_deadline_ends_a_run_wherever_it_is(steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(steps, tokenizer, slots=1) as engine:
        with pytest.raises(DeadlineExceeded):
            engine.submit(ask(1, deadline=time.monotonic() - 1))
        steps.hold()
        deadline = time.monotonic() + PATIENCE_S
        runs = [engine.submit(ask(at, deadline=deadline, max_tokens=10_000)) for at in (1, 2)]
        await begun(steps, 1)
        set_forward(monkeypatch)(PATIENCE_S)
        steps.open()
        made = await all_of(runs[0])
        assert made.finish_reason == "length"
        assert list(made.token_ids) == steps.expected((1,), len(made.token_ids))
        with pytest.raises(DeadlineExceeded, match="before there was a token"):
            await tokens_of(runs[1])
        assert await tokens_of(engine.submit(ask(3, max_tokens=1))) == steps.expected((3,), 1), "the slot is free again"


async def test_a_run_whose_text_nobody_takes_is_ended(steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = set_forward(monkeypatch)
    async with running(steps, tokenizer, slots=1, unread_s=PATIENCE_S) as engine:
        forgotten = engine.submit(ask(1, max_tokens=1_000_000))
        await until(lambda: forgotten.unread_since is not None)
        forward(PATIENCE_S + 1)
        await until(lambda: forgotten.usage.finished is not None)
        forward(0.0)
        assert await tokens_of(engine.submit(ask(2, max_tokens=2))) == steps.expected((2,), 2)
        with pytest.raises(DeadlineExceeded, match="was not read"):
            await tokens_of(forgotten)


async def test_stopping_tells_everybody(steps: FakeSteps, tokenizer: Path) -> None:
    async with running(steps, tokenizer, slots=1) as engine:
        steps.hold()
        runs = [engine.submit(ask(at, max_tokens=10_000)) for at in (1, 2)]
        await begun(steps, 1)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        steps.open()
        await stopping
        for run in runs:
            with pytest.raises(NotReady):
                await tokens_of(run)
        with pytest.raises(NotReady):
            engine.submit(ask(1))


async def test_a_thread_that_dies_leaves_nobody_waiting(steps: FakeSteps, tokenizer: Path) -> None:
    class Broken:
        def observe(self, value: float) -> None:
            raise KeyError("a bug")

    async with running(steps, tokenizer, slots=1) as engine, asyncio.timeout(PATIENCE_S):
        engine.metrics.queue_s = Broken()  # type: ignore[assignment]
        for run in [engine.submit(ask(at)) for at in (1, 2)]:
            with pytest.raises(NotReady):
                await tokens_of(run)
        with pytest.raises(NotReady):
            engine.submit(ask(3))
        await until(lambda: not engine.alive)


async def test_a_device_that_is_lost_ends_the_thread(steps: FakeSteps, tokenizer: Path) -> None:
    """Every later call would fail: the health check sees the dead thread, and a new process takes the replica's place."""
    steps.failures[0] = RuntimeError("CUDA failure 719: unspecified launch failure ; GPU=0 ; hostname=node ; file=cuda_call.cc ; line=1 ;")
    async with running(steps, tokenizer, slots=1) as engine, asyncio.timeout(PATIENCE_S):
        steps.hold()  # until both are queued: the thread dies with the first call
        first, second = [engine.submit(ask(at)) for at in (1, 2)]
        steps.open()
        with pytest.raises(RuntimeFailed):
            await tokens_of(first)
        with pytest.raises(NotReady):
            await tokens_of(second)
        await until(lambda: not engine.alive)


# Refusals and failures -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (ask(), InvalidRequest, "no tokens"),
        (ask(VOCAB_SIZE), InvalidRequest, f"token id {VOCAB_SIZE}"),
        (ask(1, -1), InvalidRequest, "token id -1"),
        (ask(1, stop_token_ids=(VOCAB_SIZE,)), InvalidRequest, f"token id {VOCAB_SIZE} of stop_token_ids"),
        (ask(1, stop=("",)), InvalidRequest, "stop string is empty"),
        (ask(5, keep=object()), InvalidRequest, "no store of states"),
        (ask(*[1] * 101), InputTooLong, "101 tokens and the maximum context length is 100"),
        (ask(1, grammar=Grammar(kind="regex", source="(")), InvalidRequest, "regex"),
    ],
)
async def test_what_cannot_run_is_refused(
    steps: FakeSteps, tokenizer: Path, request_: GenerationRequest, error: type[Exception], words: str
) -> None:
    async with running(steps, tokenizer, max_prompt_tokens=100) as engine:
        with pytest.raises(error, match=words):
            engine.submit(request_)
    assert steps.calls == []


async def test_a_request_whose_runs_begin_at_once_has_them_all(steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(steps, tokenizer, slots=2) as engine:
        steps.hold()
        queue = engine._queue

        def queue_until_begun(submission: Any) -> None:
            queue(submission)
            steps.wait(1)

        monkeypatch.setattr(engine, "_queue", queue_until_begun)
        runs = await engine.open([ask(1), ask(2), ask(3)])
        steps.open()
        assert [await tokens_of(run) for run in runs] == [steps.expected((first,), 8) for first in (1, 2, 3)]


async def test_a_failing_step_fails_those_who_took_part_and_no_one_after_them(steps: FakeSteps, tokenizer: Path) -> None:
    steps.failures = {2: RuntimeError("no memory"), 6: RuntimeError("no memory"), 7: RuntimeError("no memory still")}
    async with running(steps, tokenizer) as engine:
        with pytest.raises(RuntimeFailed):
            await tokens_of(engine.submit(ask(1, max_tokens=50)))
        assert not engine.healthy
        assert await tokens_of(engine.submit(ask(2, max_tokens=3))) == steps.expected((2,), 3)
        assert engine.healthy
        for _ in range(2):
            with pytest.raises(RuntimeFailed):
                await engine.probe(math.inf)
            assert not engine.healthy
        await engine.probe(math.inf)
        assert engine.healthy


# Fairness --------------------------------------------------------------------------------------------------------------------------------


async def test_a_long_prompt_is_fed_in_pieces_between_the_steps_of_others(steps: FakeSteps, tokenizer: Path) -> None:
    async with running(steps, tokenizer) as engine:
        steps.hold(after=3)
        streaming = engine.submit(ask(1, max_tokens=400))
        await begun(steps, 4)
        before = len(steps.calls)
        long = engine.submit(ask(*[2] * 3000, max_tokens=1))
        steps.open()
        await asyncio.gather(tokens_of(streaming), tokens_of(long))
    pieces = [at for at, call in enumerate(steps.calls[before:]) if len(call) == 1 and len(call[0]) > 1 and set(call[0]) == {2}]
    between = [call for call in steps.calls[before:][pieces[0] : pieces[-1]] if set(call[0]) != {2}]
    assert len(pieces) > 3
    assert len(between) >= 0.95 * len(pieces), "a step of the stream between two pieces"


async def test_runs_with_one_prompt_share_the_reading_of_it(steps: FakeSteps, tokenizer: Path) -> None:
    prompt = tuple(range(1, 290)) * 8
    async with running(steps, tokenizer) as engine:
        steps.hold()
        runs = await engine.open([ask(*prompt, sampling=dataclasses.replace(RANDOM, seed=seed), max_tokens=6) for seed in range(4)])
        await begun(steps, 1)
        runs[0].cancel()
        late = engine.submit(ask(*prompt, sampling=dataclasses.replace(RANDOM, seed=2), max_tokens=6))
        steps.open()
        answers = await asyncio.gather(*map(tokens_of, runs[1:]), tokens_of(late))
        alone = await tokens_of(engine.submit(ask(*prompt, sampling=dataclasses.replace(RANDOM, seed=3), max_tokens=6)))
    assert answers[2] == alone
    assert answers[1] == answers[3]
    assert sum(len(row) for call in steps.calls for row in call if len(row) > 1) == 2 * len(prompt), "once for five runs, once for the last"
    assert late.usage.cached_tokens > 0
