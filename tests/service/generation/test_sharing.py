"""Slots shared among clients: who gets one, who gives one back, and that a run that gave its slot back goes on with the same bits."""

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.errors import Overloaded, QueueTooLong
from service.generation.admission import Admission, Holding, QueueLimits, Table, fair_share
from service.generation.decoding import Decoding
from service.generation.engine import GeneratorEngine
from service.generation.intake import PromptWork
from service.generation.request import GenerationRequest, Sampling
from service.generation.run import Run
from service.generation.submission import Submission
from service.overload.queue_bound import QueueBound
from service.runtime.lanes import Lane
from tests.service.fakes import PATIENCE_S, set_forward, until
from tests.service.generation.fake_steps import FakeSteps
from tests.service.generation.test_engine import GREEDY, RANDOM, all_of, ask, begun, running, tokens_of

ENDLESS = 1_000_000


@asynccontextmanager
async def held(engine: GeneratorEngine, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[Run]]:
    """Runs that go on for as long as the block, each of a request of its own or all of one where they have one client; all have begun."""
    runs = await engine.open(requests)
    try:
        await until(lambda: sum(run.usage.completion_tokens > 0 for run in runs) >= min(len(runs), engine.limits.slots))
        yield runs
    finally:
        for run in runs:
            run.cancel()


# One request and others ------------------------------------------------------------------------------------------------------------------


async def test_a_request_that_takes_all_slots_gives_one_to_the_next_client_and_goes_on_with_the_same_tokens(
    steps: FakeSteps, tokenizer: Path
) -> None:
    """Within the calls that the gate lets through: it does not wait for a quantum of 128 tokens, let alone for an end."""
    greedy = [ask(at, max_tokens=250, client="many") for at in range(1, 3)]
    drawn = [ask(at, max_tokens=250, client="many", sampling=dataclasses.replace(RANDOM, seed=at)) for at in range(5, 7)]
    async with running(steps, tokenizer, slots=4) as engine, asyncio.timeout(3 * PATIENCE_S):
        alone = [await tokens_of(run) for run in await engine.open(drawn)]
        steps.hold(after=8)
        runs = await engine.open([*greedy, *drawn])
        await until(lambda: all(run.usage.started for run in runs))
        for at in range(3):
            one = engine.submit(ask(20 + at, max_tokens=2, client="one"))
            steps.release(16)
            assert await tokens_of(one) == steps.expected((20 + at,), 2)
        steps.open()
        answers = await asyncio.gather(*map(tokens_of, runs))
    assert answers[:2] == [steps.expected(request.prompt, 250) for request in greedy]
    assert answers[2:] == alone


async def test_long_runs_go_on_however_many_short_ones_come(steps: FakeSteps, tokenizer: Path) -> None:
    async with running(steps, tokenizer, slots=2) as engine, asyncio.timeout(3 * PATIENCE_S):
        long = [engine.submit(ask(at + 1, max_tokens=300, client=str(at))) for at in range(3)]
        ended = asyncio.gather(*map(tokens_of, long))

        async def come(first: int) -> None:
            for at in range(first, ENDLESS, 4):
                await tokens_of(engine.submit(ask(1, max_tokens=2, client=f"new {at}")))

        coming = [asyncio.create_task(come(at)) for at in range(4)]
        assert await ended == [steps.expected((at + 1,), 300) for at in range(3)]
        for task in coming:
            task.cancel()


async def test_any_mix_of_clients_draws_what_each_draws_alone(steps: FakeSteps, tokenizer: Path) -> None:
    """Prompts of all lengths, penalties, grammars of none, log-probabilities: set aside wherever their turn ends."""
    dice = random.Random(3)
    manners = [GREEDY, RANDOM, dataclasses.replace(RANDOM, repetition_penalty=1.3), dataclasses.replace(RANDOM, typical_p=0.7)]
    requests = [
        ask(
            *[dice.randrange(1, 290) for _ in range(dice.choice((1, 5, 40, 600)))],
            max_tokens=dice.choice((1, 30, 120)),
            sampling=dataclasses.replace(dice.choice(manners), seed=at),
            client=dice.choice("abc"),
            lane=dice.choice((Lane.INTERACTIVE, Lane.INTERACTIVE, Lane.BULK)),
            top_logprobs=dice.choice((None, 1)),
            prompt_logprobs=dice.choice((None, None, 0)),
            stop=dice.choice(((), ("no such text",))),
        )
        for at in range(14)
    ]
    async with running(steps, tokenizer, slots=14) as engine:
        alone = []
        for request in requests:
            run = engine.submit(request)
            alone.append((await all_of(run), list(run.prompt_logprobs)))
    async with running(FakeSteps(), tokenizer, slots=3, bulk_delay_s=0.01, max_wait_s=1000, max_bulk_wait_s=1000) as engine:
        engine._decoding.__class__ = _Hasty
        runs = [engine.submit(request) for request in requests]
        answers = list(zip(await asyncio.gather(*map(all_of, runs)), [list(run.prompt_logprobs) for run in runs], strict=True))
    assert answers == alone


class _Hasty(Decoding):
    """Whose runs give their slots back after a few tokens, so that a short test sees it happen often."""

    quantum = 5  # type: ignore[assignment]


# While it has no slot --------------------------------------------------------------------------------------------------------------------


async def test_a_run_set_aside_can_be_left_and_ends_at_its_deadline(
    steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(steps, tokenizer, slots=1) as engine, asyncio.timeout(3 * PATIENCE_S):

        async def aside(**options: Any) -> tuple[Run, Run]:
            """A run without a slot that had one, and the one that has it now."""
            first = engine.submit(ask(7, max_tokens=ENDLESS, client="a", lane=Lane.BULK, **options))
            await until(lambda: first.usage.completion_tokens > 20)
            second = engine.submit(ask(8, max_tokens=ENDLESS, client="b"))
            await until(lambda: second.usage.completion_tokens > 0 and engine.admission.aside == 1)
            return first, second

        left, holder = await aside()
        left.cancel()
        await until(lambda: engine.admission.aside == 0)
        holder.cancel()

        late, holder = await aside(deadline=time.monotonic() + PATIENCE_S)
        set_forward(monkeypatch)(PATIENCE_S)
        assert (await all_of(late)).finish_reason == "length"
        holder.cancel()
        assert await tokens_of(engine.submit(ask(9, max_tokens=2))) == steps.expected((9,), 2)


async def test_a_prompt_that_is_half_read_is_set_aside_and_read_on(steps: FakeSteps, tokenizer: Path) -> None:
    long = list(range(1, 280)) * 20
    async with running(steps, tokenizer, slots=1) as engine, asyncio.timeout(3 * PATIENCE_S):
        steps.hold()
        runs = [engine.submit(ask(*long, max_tokens=3, client="a"))]
        steps.release(1)
        await begun(steps, 2)
        runs += [engine.submit(ask(5, max_tokens=2, client="b"))]
        steps.open()
        answers = await asyncio.gather(*map(tokens_of, runs))
    assert answers == [steps.expected(long, 3), steps.expected((5,), 2)]
    assert steps.calls.index([[5]]) < 4, "before the long one is read"
    assert sum(len(row) for call in steps.calls for row in call if len(row) > 1) == len(long), "no token twice"


async def test_choices_share_the_prompt_whose_log_probabilities_the_first_of_them_is_told(steps: FakeSteps, tokenizer: Path) -> None:
    prompt = list(range(1, 200)) * 2
    first, *others = [ask(*prompt, max_tokens=3, prompt_logprobs=None if at else 1) for at in range(3)]
    async with running(steps, tokenizer, slots=3) as engine, asyncio.timeout(PATIENCE_S):
        alone = engine.submit(first)
        answer = await tokens_of(alone)
        calls = len(steps.calls)
        runs = await engine.open([first, *others])
        assert await asyncio.gather(*map(tokens_of, runs)) == [answer] * 3
        assert sum(len(row) for call in steps.calls[calls:] for row in call) == len(prompt) + 3 * 2, "the prompt is fed once"
    assert [list(run.prompt_logprobs) for run in runs] == [list(alone.prompt_logprobs), [], []]
    assert len(alone.prompt_logprobs) == len(prompt)


async def test_a_prompt_is_never_shared_across_clients(steps: FakeSteps, tokenizer: Path) -> None:
    """How much of it was read already would tell one what the other one asks."""
    prompt = list(range(1, 280)) * 8
    async with running(steps, tokenizer) as engine, asyncio.timeout(3 * PATIENCE_S):
        steps.hold()
        first = engine.submit(ask(*prompt, max_tokens=1, client="a"))
        steps.release(1)
        await begun(steps, 2)
        same, other = [engine.submit(ask(*prompt, max_tokens=1, client=client)) for client in "ab"]
        steps.open()
        await asyncio.gather(*map(tokens_of, (first, same, other)))
    assert same.usage.cached_tokens > 0
    assert other.usage.cached_tokens == 0


async def test_a_short_request_waits_for_few_tokens_of_another_clients_long_prompt(steps: FakeSteps, tokenizer: Path) -> None:
    async with running(steps, tokenizer) as engine, asyncio.timeout(3 * PATIENCE_S):

        async def next_call() -> int:
            calls = len(steps.calls) + 1
            steps.release()
            await begun(steps, calls)
            return calls

        steps.hold()
        long = engine.submit(ask(*[7] * 20_000, max_tokens=1, client="a"))
        await begun(steps, 1)
        for number in range(4):
            at = await next_call() - 1
            short = engine.submit(ask(5, max_tokens=1, client=f"b{number}"))
            while short.usage.finished is None:
                await next_call()
            waited = [len(row) for call in steps.calls[at:-1] for row in call if row != [5]]
            assert sum(waited) <= 256 + 64, "the piece that is running, and perhaps a shorter one before the short prompt"
        steps.open()
        long.cancel()


# Refusals --------------------------------------------------------------------------------------------------------------------------------


def test_a_prompt_whose_turn_comes_after_its_deadline_is_refused() -> None:
    work, now = PromptWork(lambda: 0.00098, list), time.monotonic()
    with contextlib.ExitStack() as tokenised:
        for client in ("many", "many", "many", "few"):
            tokenised.enter_context(work.expecting(client, 10_000, now + 600))
        with pytest.raises(QueueTooLong, match=r"the prompts before this one take about 39.. s") as refused:
            work.check("many", 10_000, now + 25)
        assert 0 < refused.value.retry_after_s < 39
        work.check("many", 10_000, now + 600)
        work.check("many", 9_999, now + 25)  # shorter prompts come first
        work.check("another", 10_000, now + 25)  # clients take turns
    work.check("many", 10_000, now)  # nothing comes before it


async def test_a_request_that_found_no_slot_in_time_is_refused_with_a_time_to_come_back(steps: FakeSteps, tokenizer: Path) -> None:
    async with running(steps, tokenizer, slots=1, max_wait_s=0.05, max_aside=0) as engine, asyncio.timeout(3 * PATIENCE_S):
        long = engine.submit(ask(1, max_tokens=ENDLESS, client="a"))
        await until(lambda: long.usage.completion_tokens > 0)
        runs = [engine.submit(ask(2, client="b")) for _ in range(2)]
        for run in runs:
            with pytest.raises(QueueTooLong, match=r"has waited .* for a slot and may wait 0.05 s") as refused:
                await tokens_of(run)
            assert refused.value.retry_after_s >= 1
        assert engine.pending == 1, "the slot of the long run"
        long.cancel()
        assert await tokens_of(engine.submit(ask(2, client="b", max_tokens=2))) == steps.expected((2,), 2)


async def test_the_runs_of_a_request_that_has_begun_wait_for_as_long_as_it_takes(steps: FakeSteps, tokenizer: Path) -> None:
    async with running(steps, tokenizer, slots=1, max_wait_s=0.02) as engine, asyncio.timeout(3 * PATIENCE_S):
        runs = await engine.open([ask(at + 1, max_tokens=150) for at in range(4)])
        assert await asyncio.gather(*map(tokens_of, runs)) == [steps.expected((at + 1,), 150) for at in range(4)]


@pytest.mark.parametrize("lengths", [(300,) * 32, (1,) * 32, (3000, 1, 1, 500)])
async def test_an_engine_with_free_slots_refuses_nobody(steps: FakeSteps, tokenizer: Path, lengths: Sequence[int]) -> None:
    """Whatever was learned of prices before, and however long the prompts are that were asked for in the same moment."""
    async with running(steps, tokenizer, max_wait_s=1) as engine, asyncio.timeout(3 * PATIENCE_S):
        for _ in range(12):
            await tokens_of(engine.submit(ask(1, max_tokens=1)))
        steps.hold()
        runs = [run for at, length in enumerate(lengths) for run in await engine.open([ask(*[1 + at] * length, max_tokens=1)])]
        for run in runs:
            run.cancel()
        steps.open()


async def test_a_full_queue_makes_room_for_a_client_with_fewer_requests(steps: FakeSteps, tokenizer: Path) -> None:
    async with running(steps, tokenizer, slots=1, max_waiting=4) as engine, asyncio.timeout(3 * PATIENCE_S):
        steps.hold()
        holder = engine.submit(ask(1, max_tokens=1))
        await begun(steps, 1)
        many = [engine.submit(ask(2, max_tokens=1, client="many")) for _ in range(4)]
        with pytest.raises(Overloaded, match="4 requests"):
            engine.submit(ask(2, client="many"))
        other = engine.submit(ask(3, max_tokens=1, client="one"))
        with pytest.raises(Overloaded, match="took the place"):
            await tokens_of(many.pop())
        steps.open()
        assert all(await asyncio.gather(*map(tokens_of, [holder, *many, other])))


# The rule --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "shares"),
    [
        ({"a": 32}, {"a": 32}),
        ({"a": 100, "b": 1}, {"a": 31, "b": 1}),
        ({"a": 100, "b": 100, "c": 4}, {"a": 14, "b": 14, "c": 4}),
        ({str(at): 1 for at in range(64)}, {str(at): 0.5 for at in range(64)}),
    ],
)
def test_a_fair_share_is_what_is_wanted_as_far_as_nobody_has_less(wanted: dict[str, int], shares: dict[str, float]) -> None:
    assert fair_share(wanted, 32) == pytest.approx(shares)


def waiting(**counts: int) -> Admission[Any]:
    """Requests of one run each, so many of each client."""
    admission = Admission[Any](QueueLimits(max_waiting=1000, max_waiting_tokens=10**6))
    for client, count in counts.items():
        for _ in range(count):
            submission = Submission[Any](client, Lane.INTERACTIVE, 0.0, 0.0)
            submission.fresh.append(_Waits(submission))
            admission.queue(submission, retry_after_s=0)
    return admission


class _Waits:
    """As much of a sequence as a queue looks at."""

    left_of_prompt, aside, slots = 1, False, 1

    def __init__(self, submission: Submission[Any], gone_on: int = 0) -> None:
        self.submission, self.gone_on = submission, gone_on
        self.request = GenerationRequest(
            prompt=(1,), sampling=Sampling(seed=0), max_tokens=1, client=submission.client, lane=submission.lane
        )


def request(client: str, lane: Lane = Lane.INTERACTIVE, *, since: float = 9.0, begun: bool = False, aside: bool = False) -> Submission[Any]:
    """A request with one job, which waits for its first slot, or (`aside`) has given its slot back."""
    submission = Submission[Any](client, lane, submitted=0.0, since=since, begun=begun or aside)
    (submission.aside if aside else submission.fresh).append(_Waits(submission))
    return submission


def holds(client: str, slots: int, *, gone_on: int = 0, lane: Lane = Lane.INTERACTIVE) -> list["_Waits"]:
    """Jobs of one request that hold slots. The last one has computed `gone_on` tokens since it got its slot."""
    submission = Submission[Any](client, lane, submitted=0.0, since=0.0, begun=True)
    return [_Waits(submission, gone_on if at == slots - 1 else 0) for at in range(slots)]


BULK = Lane.BULK
EARLY, LATE = request("b", since=1.0), request("b", since=2.0)
FRESH, BEGUN = request("b"), request("c", begun=True, since=8.0)
OLD_BULK, NEW_BULK = request("b", BULK, since=1.0), request("b", BULK)
ASIDE = request("b", aside=True)


@pytest.mark.parametrize(
    ("waiting", "holders", "options", "decision"),
    [
        ([], [], {"free": 4}, None),
        ([LATE, EARLY], [], {"free": 1}, (EARLY, None)),
        ([EARLY], holds("a", 4), {"free": 0, "quantum": None}, None),  # nobody can be preempted
        ([FRESH, BEGUN], holds("b", 1), {"free": 1}, (BEGUN, None)),  # the client with fewer slots
        ([FRESH, BEGUN], [], {"free": 1}, (FRESH, None)),  # new requests and begun ones in turns
        ([FRESH, BEGUN], [], {"free": 1, "fresh_first": False}, (BEGUN, None)),
        ([NEW_BULK, FRESH], [], {"free": 1}, (FRESH, None)),
        ([OLD_BULK, FRESH], [], {"free": 1}, (OLD_BULK, None)),  # bulk work that has waited counts as interactive, and is older
        ([FRESH], holds("a", 2), {}, (FRESH, 1)),  # two slots more: at once
        ([FRESH], [*holds("a", 1), *holds("b", 1)], {}, None),  # one client's fair share
        ([FRESH], holds("a", 1, gone_on=9), {}, None),  # one slot more: after a quantum of 10 tokens
        ([FRESH], holds("a", 1, gone_on=10), {}, (FRESH, 0)),
        ([FRESH], holds("a", 3), {"room": False}, None),  # no memory for another preempted job
        ([ASIDE], holds("a", 3, gone_on=5), {"room": False}, (ASIDE, 2)),  # but one preempted job makes room for another
        ([FRESH], holds("b", 1, gone_on=15, lane=BULK), {}, None),  # bulk gives way after 16 tokens, also to its own client
        ([FRESH], holds("b", 1, gone_on=16, lane=BULK), {}, (FRESH, 0)),
        ([NEW_BULK], holds("a", 4, gone_on=99), {}, None),  # interactive work does not give way to bulk
        ([FRESH], [*holds("a", 2), *holds("c", 3)], {}, (FRESH, 4)),  # of the client with the most slots
    ],
)
def test_who_gets_slots(waiting: list[Submission[Any]], holders: list["_Waits"], options: dict[str, Any], decision: Any) -> None:
    given = {"free": 0, "quantum": 10, "room": True, "fresh_first": True, **options}
    fresh_first = given.pop("fresh_first")
    decided = Table[Any](waiting, holders, **given).decide(10.0, fresh_first=fresh_first, bulk_delay_s=5.0)
    if decision is not None and decision[1] is not None:
        decision = decision[0], holders[decision[1]]
    assert decided == decision


@pytest.mark.parametrize(
    ("held", "others", "wait_s"),
    [
        ({}, {}, 0),
        ({"hog": 32}, {}, 0),  # a share of the hog's slots is there at once
        ({"hog": 32}, {"hog": 100}, 0),
        ({"hog": 16, "me": 16}, {"me": 8}, 8 * 0.25 / 16),
        ({str(at): 1 for at in range(32)}, {f"new {at}": 1 for at in range(40)}, 40 * 0.25 / 32),
        ({str(at): 1 for at in range(32)}, {"new": 100}, 0.25 / 32),
    ],
)
def test_a_wait_is_estimated_by_the_turns_of_those_before(held: dict[str, int], others: dict[str, int], wait_s: float) -> None:
    admission, checked = waiting(**others), list[float]()

    class Noted(QueueBound):
        def check(self, now: float, queue_s: float, short_queue_s: float, **_: Any) -> float:
            checked.append(queue_s)
            return 0.0

    admission._bounds = {lane: Noted(0.0) for lane in Lane}
    admission.check("me", Lane.INTERACTIVE, 0.0, Holding(32, held, 0.25))
    assert (checked or [0.0]) == pytest.approx([wait_s])
