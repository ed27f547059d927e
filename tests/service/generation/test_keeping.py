"""States that requests continue and keep: the engine and a real store together, compared with runs of the whole text."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from export import contract
from service.errors import InputTooLong, InvalidRequest, QuotaExceeded, ServiceError, StateNotFound
from service.generation import prefill, sequence
from service.generation.engine import GeneratorEngine
from service.generation.request import Delta, GenerationRequest, Grammar, Sampling
from service.generation.saved.keeper import StateKeeper
from service.generation.session import OnnxStepSession, StepSession
from service.generation.state import State
from service.states.record import Keep, Quota, StateRecord, StateReference, new_state_id
from service.states.sqlite import SqliteEngine
from service.states.store import Store
from tests.service.fakes import PATIENCE_S, set_forward, until
from tests.service.generation.fake_steps import VOCAB_SIZE, FakeSteps
from tests.service.generation.test_engine import all_of, ask, begun, running, tokens_of
from tests.service.states.sequences import a_record

RANDOM = Sampling(seed=7, temperature=1.0, top_k=40, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.3)
ROOM = Quota(states=100, size=2**24)


class Kept:
    """An engine with its keeper and store; a service that is started again has a new engine and keeper on the old store."""

    def __init__(self, engine: GeneratorEngine, store: Store, keeper: StateKeeper) -> None:
        self.engine, self.store, self.keeper = engine, store, keeper

    def keep(self, parent: str | None = None, *, quota: Quota = ROOM) -> Keep:
        record = a_record(time.time(), tenant="t", position=0, parent=parent)
        return Keep(record=record, quota=quota)

    async def run(self, *prompt: int, start: str | None = None, exact: bool = True, **options: Any) -> tuple[Delta, str]:
        """Continue a state, or the empty one, and keep the state after the last token. Returns what was made, and the state's id."""
        keep = self.keep(start)
        reference = None if start is None else StateReference("t", start, exact)
        (run,) = await self.engine.open([ask(*prompt, start=reference, keep=keep, **options)])
        return await all_of(run), keep.record.id

    async def record(self, state: str) -> StateRecord:
        return await self.store.call(lambda engine: engine.get("t", state))


@asynccontextmanager
async def keeping(
    steps: StepSession[Any],
    tokenizer: Path,
    store: Store | None = None,
    *,
    numerics: str = "ab",
    hot_bytes: int = 0,
    cache_bytes: int = 0,
    hand_over_s: float = 0.0,
) -> AsyncIterator[Kept]:
    own = store or Store(SqliteEngine(None))
    keeper = StateKeeper(
        own, steps.decoder, vocab_size=steps.vocab_size, fingerprint=steps.fingerprint, numerics=numerics, hot_bytes=hot_bytes
    )
    limits = {"prefix_cache_bytes": cache_bytes, "hand_over_s": hand_over_s}
    async with running(steps, tokenizer, numerics=numerics, keeper=keeper, **limits) as engine:
        yield Kept(engine, own, keeper)
    if store is None:
        own.close()


def fed(steps: FakeSteps, since: int = 0) -> int:
    return sum(len(row) for call in steps.calls[since:] for row in call)


@pytest.mark.parametrize("hot_bytes", [0, 2**20])
@pytest.mark.parametrize("sampling", [Sampling(seed=0, temperature=0), RANDOM], ids=["greedy", "random"])
async def test_turns_from_kept_states_are_the_tokens_of_one_long_text(
    steps: FakeSteps, tokenizer: Path, hot_bytes: int, sampling: Sampling
) -> None:
    async with keeping(steps, tokenizer, hot_bytes=hot_bytes) as kept:
        first, state = await kept.run(5, 6, 7, sampling=sampling, max_tokens=9)
        second, again = await kept.run(8, 9, start=state, sampling=sampling, max_tokens=6)
        third, _ = await kept.run(start=again, sampling=replace(sampling, frequency_penalty=0.0), max_tokens=4)
        text = (5, 6, 7, *first.token_ids, 8, 9)
        assert list(second.token_ids) == await tokens_of(kept.engine.submit(ask(*text, sampling=sampling, max_tokens=6)))
        text = (*text, *second.token_ids)
        plain = kept.engine.submit(ask(*text, sampling=replace(sampling, frequency_penalty=0.0), max_tokens=4))
        assert list(third.token_ids) == await tokens_of(plain)
        record = await kept.record(again)
    assert (record.position, record.parent, record.numerics) == (20, state, "ab")


async def test_no_token_before_a_state_is_fed_again(steps: FakeSteps, tokenizer: Path) -> None:
    async with keeping(steps, tokenizer) as kept:
        _, state = await kept.run(*range(1, 200), max_tokens=3)
        assert fed(steps) == 199 + 3, "the last token is fed too, because the state after it is kept"
        calls = len(steps.calls)
        await kept.run(start=state, max_tokens=2)
        assert fed(steps, calls) == 2
        calls = len(steps.calls)
        await kept.run(3, 4, start=state, max_tokens=2)
    assert fed(steps, calls) == 2 + 2


async def test_short_prompts_that_continue_states_are_fed_together(steps: FakeSteps, tokenizer: Path) -> None:
    """Each from its own state and position, beside prompts that begin at the empty state."""
    prompts = [tuple(range(at, at + 1 + at % 5)) for at in range(1, 9)]
    async with keeping(steps, tokenizer) as kept:
        begun_at = [tuple(range(at, 3 * at)) for at in range(2, 8)]
        states = [(await kept.run(*before, max_tokens=0))[1] for before in begun_at]
        calls = len(steps.calls)
        steps.hold()
        runs = await kept.engine.open([ask(250, max_tokens=1)])
        await begun(steps, calls + 1)
        for prompt, state in zip(prompts, [*states, None, None], strict=True):
            runs += await kept.engine.open([ask(*prompt, max_tokens=2, start=None if state is None else StateReference("t", state))])
        steps.open()
        answers = await asyncio.gather(*map(tokens_of, runs))
    whole = [(*before, *prompt) for before, prompt in zip([*begun_at, (), ()], prompts, strict=True)]
    assert answers[1:] == [steps.expected(text, 2) for text in whole]
    assert sorted(steps.calls[calls + 1]) == sorted(map(list, prompts)), "all in one call"


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({"max_tokens": 6}, "length"),
        ({"max_tokens": 50, "stop": ("k",)}, "stop"),
        ({"max_tokens": 50, "stop_token_ids": tuple(range(40, 80))}, "stop"),
        ({"max_tokens": 50, "grammar": Grammar(kind="regex", source="[a-z]{5}")}, "stop"),
    ],
    ids=["length", "stop", "id", "grammar"],
)
async def test_the_state_is_that_after_the_last_token_however_a_run_ends(
    steps: FakeSteps, tokenizer: Path, options: dict[str, Any], ending: str
) -> None:
    async with keeping(steps, tokenizer) as kept:
        plain = await all_of(kept.engine.submit(ask(5, 6, sampling=RANDOM, **options)))
        made, state = await kept.run(5, 6, sampling=RANDOM, **options)
        assert made == plain
        assert made.finish_reason == ending
        assert (await kept.record(state)).position == 2 + len(made.token_ids)
        rest, _ = await kept.run(start=state, max_tokens=5)
    assert list(rest.token_ids) == steps.expected((5, 6, *made.token_ids), 5)


async def test_a_model_that_is_at_its_last_position_keeps_a_state_that_fits(tokenizer: Path) -> None:
    steps = FakeSteps(n_positions=8)
    async with keeping(steps, tokenizer) as kept:
        made, state = await kept.run(5, 6, 7, max_tokens=50)
        assert len(made.token_ids) == 5
        assert (await kept.record(state)).position == 8
        with pytest.raises(InputTooLong, match="has seen 8 tokens and the prompt has 1 more, and this model's maximum context length is 8"):
            await kept.run(9, start=state)


HARD = {
    "plain": {"sampling": RANDOM},
    "logprobs": {"sampling": RANDOM, "top_logprobs": 3},
    "stop": {"sampling": RANDOM, "stop": ("zzzz", "ab"), "min_tokens": 4},
    "grammar": {"sampling": RANDOM, "grammar": Grammar(kind="regex", source="([a-z]{3} ){4}")},
    "bias": {"sampling": replace(RANDOM, logit_bias={70: 3.0}), "stop_token_ids": (3, 4)},
}


@pytest.mark.parametrize("hard", HARD)
async def test_a_run_goes_on_after_any_of_its_tokens_in_an_engine_that_never_saw_it(steps: FakeSteps, tokenizer: Path, hard: str) -> None:
    asked = ask(5, 6, 7, max_tokens=14, **HARD[hard])
    async with keeping(steps, tokenizer) as kept:
        whole = await all_of(kept.engine.submit(asked))
        assert len(whole.token_ids) > 3
        for n in range(len(whole.token_ids)):
            told = await all_of(kept.engine.submit(replace(asked, known=whole.token_ids[:n])))
            assert told.token_ids == whole.token_ids[n:]
            assert told.logprobs == whole.logprobs[n:]
            assert whole.text.endswith(told.text)
            assert (told.finish_reason, told.stop_reason) == (whole.finish_reason, whole.stop_reason)


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 6}, {"max_tokens": 50, "stop": ("k",)}, {"max_tokens": 50, "stop_token_ids": tuple(range(40, 80))}],
    ids=["length", "stop", "id"],
)
async def test_a_run_that_was_lost_after_its_last_token_still_keeps_its_state(
    steps: FakeSteps, tokenizer: Path, options: dict[str, Any]
) -> None:
    async with keeping(steps, tokenizer) as kept:
        whole, _ = await kept.run(5, 6, sampling=RANDOM, **options)
        end, state = await kept.run(5, 6, sampling=RANDOM, known=whole.token_ids, **options)
        assert end == Delta("", finish_reason=whole.finish_reason, stop_reason=whole.stop_reason)
        assert (await kept.record(state)).position == 2 + len(whole.token_ids)
        rest, _ = await kept.run(start=state, max_tokens=5)
        assert list(rest.token_ids) == steps.expected((5, 6, *whole.token_ids), 5)
        with pytest.raises(InvalidRequest, match="the run has ended"):
            await kept.run(5, 6, sampling=RANDOM, known=(*whole.token_ids, 9), **options)


@pytest.mark.parametrize("checkpoint", [False, True])
async def test_a_run_that_is_lost_twice_after_its_last_token_draws_no_other(
    steps: FakeSteps, tokenizer: Path, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "CHECKPOINT_TOKENS", 10)
    prompt = tuple(range(5, 25))
    id = new_state_id() if checkpoint else ""
    async with keeping(steps, tokenizer, cache_bytes=0 if checkpoint else 2**20) as kept:
        kept.keeper.forget = lambda *args, **options: None  # type: ignore[method-assign]  # the checkpoint stays, as if the process were lost
        whole = await all_of(kept.engine.submit(ask(*prompt, max_tokens=6)))
        for _ in range(2):  # the second one finds the state after all tokens, in the prefix cache or as a checkpoint
            end, state = await kept.run(*prompt, max_tokens=6, known=whole.token_ids, checkpoint=id)
            assert (end.token_ids, end.finish_reason) == ((), "length")
            assert (await kept.record(state)).position == 26


async def test_a_run_that_was_lost_after_its_end_token_still_gives_an_incomplete_character(steps: FakeSteps, tokenizer: Path) -> None:
    first_byte = 1 + sorted(pre_tokenizers.ByteLevel.alphabet()).index("Ã")  # of a character of two bytes
    async with keeping(steps, tokenizer) as kept:
        end, _ = await kept.run(5, 6, known=(first_byte, 70), max_tokens=50, stop_token_ids=(70,))
        assert end == Delta("\N{REPLACEMENT CHARACTER}", finish_reason="stop", stop_reason=70)


async def test_a_run_that_had_ended_cannot_go_on(steps: FakeSteps, tokenizer: Path) -> None:
    async with keeping(steps, tokenizer) as kept:
        whole = await tokens_of(kept.engine.submit(ask(5, max_tokens=3)))
        with pytest.raises(InvalidRequest, match="the run has ended"):
            kept.engine.submit(ask(5, max_tokens=3, known=tuple(whole)))
        with pytest.raises(InvalidRequest, match="outside this model's vocabulary"):
            kept.engine.submit(ask(5, max_tokens=3, known=(VOCAB_SIZE,)))


async def test_states_that_cannot_be_continued_are_refused(steps: FakeSteps, tokenizer: Path) -> None:
    async with keeping(steps, tokenizer) as kept:
        _, state = await kept.run(5, max_tokens=2)
        with pytest.raises(StateNotFound):
            await kept.engine.open([ask(6, start=StateReference("another tenant", state))])
        with pytest.raises(StateNotFound):
            await kept.run(6, start=new_state_id())
        with pytest.raises(InvalidRequest, match="max_tokens is 0: fork the state"):
            await kept.run(start=state, max_tokens=0)
        async with keeping(steps, tokenizer, kept.store, numerics="cd") as there:
            with pytest.raises(InvalidRequest, match="other arithmetic"):
                await there.run(6, start=state)
            made, _ = await there.run(6, start=state, exact=False, max_tokens=3)
            assert len(made.token_ids) == 3
        other = FakeSteps()
        other.fingerprint = "another bundle"
        async with keeping(other, tokenizer, kept.store) as there:
            with pytest.raises(InvalidRequest, match="of the bundle with fingerprint 'fake'"):
                await there.run(6, start=state)


async def test_a_run_whose_state_cannot_be_stored_ends_with_the_reason(steps: FakeSteps, tokenizer: Path) -> None:
    async with keeping(steps, tokenizer) as kept:
        (run,) = await kept.engine.open([ask(5, max_tokens=2, keep=kept.keep(quota=Quota(states=1, size=10)))])
        with pytest.raises(QuotaExceeded):
            await all_of(run)
        kept.store.close()
        (run,) = await kept.engine.open([ask(5, max_tokens=2, keep=kept.keep())])
        with pytest.raises(ServiceError, match="the store of states is closed"):
            await all_of(run)
        assert await tokens_of(kept.engine.submit(ask(5, max_tokens=2)))


async def test_a_run_that_ends_at_its_deadline_is_kept_after_its_last_token(
    steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keeping(steps, tokenizer) as kept:
        steps.hold(4)
        keep = kept.keep()
        (run,) = await kept.engine.open([ask(5, 6, max_tokens=100_000, keep=keep, deadline=time.monotonic() + PATIENCE_S)])
        await until(lambda: run.usage.completion_tokens)
        set_forward(monkeypatch)(PATIENCE_S)
        steps.open()
        made = await all_of(run)
        assert made.finish_reason == "length"
        rest, _ = await kept.run(start=keep.record.id, max_tokens=8)
        assert [*made.token_ids, *rest.token_ids] == steps.expected((5, 6), len(made.token_ids) + 8)


async def test_every_kind_of_state_continues_to_the_bit_after_a_restart(constant_states_bundle: Path, tmp_path: Path) -> None:
    def opened() -> OnnxStepSession:
        return OnnxStepSession(constant_states_bundle, contract.read_manifest(constant_states_bundle), threads=2)

    tokenizer = constant_states_bundle / contract.TOKENIZER
    store = Store(SqliteEngine(tmp_path))
    async with keeping(opened(), tokenizer, store) as kept:
        whole = await tokens_of(kept.engine.submit(ask(5, 6, 7, sampling=RANDOM, max_tokens=40)))
        first, state = await kept.run(5, 6, 7, sampling=RANDOM, max_tokens=20)
    store.close()
    store = Store(SqliteEngine(tmp_path))
    plain = replace(RANDOM, frequency_penalty=0.0, repetition_penalty=1.0)
    async with keeping(opened(), tokenizer, store) as kept:
        known, _ = await kept.run(5, 6, 7, sampling=RANDOM, max_tokens=40, known=first.token_ids)
        assert [*first.token_ids, *known.token_ids] == whole
        rest, _ = await kept.run(start=state, sampling=plain, max_tokens=20)
        assert list(rest.token_ids) == await tokens_of(kept.engine.submit(ask(5, 6, 7, *first.token_ids, sampling=plain, max_tokens=20)))
    store.close()


async def test_a_lost_run_goes_on_from_its_newest_checkpoint(steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "CHECKPOINT_TOKENS", 10)
    prompt = tuple(range(1, 41))
    asked = ask(*prompt, sampling=RANDOM, max_tokens=100, ignore_eos=True, tenant="t", checkpoint=new_state_id())
    here = FakeSteps()
    async with keeping(here, tokenizer) as kept:
        whole = await tokens_of(kept.engine.submit(replace(asked, checkpoint="")))
        calls = len(here.calls)
        here.hold()
        run = kept.engine.submit(asked)
        here.release(31)  # the prompt, and 30 steps: checkpoints at positions 40, 50, 60 and 70
        await begun(here, calls + 32)
        run.cancel()
        here.open()
        (document,) = await kept.store.call(lambda engine: engine.documents("t/checkpoints", "checkpoint", None, 9))
        async with keeping(steps, tokenizer, kept.store) as there:
            (run,) = await there.engine.open([replace(asked, known=tuple(whole[:36]), reopened=True)])
            assert await tokens_of(run) == whole[36:]
            assert fed(steps) == 40 + 99 - 70, "the tokens before the checkpoint were not fed again"
            assert not await there.store.call(lambda engine: engine.documents("t/checkpoints", "checkpoint", None, 9)), "the run has ended"
        other = FakeSteps()
        async with keeping(other, tokenizer, kept.store) as there:
            await there.store.call(lambda engine: engine.write(replace(document, version=0), None, ROOM))
            told = (*whole[:29], whole[29] + 1, *whole[30:36])  # the last token that the checkpoint has seen is another one
            (run,) = await there.engine.open([replace(asked, known=told, max_tokens=40, reopened=True)])
            rest = await tokens_of(run)
            plain = await there.engine.open([replace(asked, known=told, max_tokens=40, checkpoint="")])
            assert rest == await tokens_of(plain[0])
            assert fed(other) == 2 * (40 + 39), "the checkpoint of other tokens is not used"


@pytest.mark.parametrize(("pieces", "newest"), [(3, 20), (6, 60)], ids=["in its middle", "at its end"])
async def test_a_run_lost_before_its_first_token_goes_on_from_the_checkpoint_of_its_prompt(
    steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, pieces: int, newest: int
) -> None:
    for name in ("CHECKPOINT_TOKENS", "PROMPT_CHECKPOINT_TOKENS"):
        monkeypatch.setattr(sequence, name, 20)
    monkeypatch.setattr(prefill, "_MOST_PIECE", 10)
    looked: list[str] = []
    checkpoint_of = StateKeeper.checkpoint_of

    async def counted(self: StateKeeper, request: GenerationRequest, start: int) -> State | None:
        looked.append(request.checkpoint)
        return await checkpoint_of(self, request, start)

    monkeypatch.setattr(StateKeeper, "checkpoint_of", counted)
    asked = ask(*range(1, 61), sampling=RANDOM, max_tokens=8, ignore_eos=True, tenant="t", checkpoint=new_state_id())
    here = FakeSteps()
    async with keeping(here, tokenizer) as kept:
        whole = await tokens_of(kept.engine.submit(replace(asked, checkpoint="")))
        calls = len(here.calls)
        here.hold()
        (run,) = await kept.engine.open([asked])
        assert not looked, "a run that is opened for the first time has no checkpoint"
        here.release(pieces)
        await begun(here, calls + pieces + 1)
        async with keeping(steps, tokenizer, kept.store) as there:
            (again,) = await there.engine.open([replace(asked, reopened=True)])
            assert await tokens_of(again) == whole
            assert fed(steps) == 60 - newest + 7, "the tokens before the checkpoint were not fed again"
            assert again.usage.prompt_tokens == 60
        assert looked == [asked.checkpoint]
        run.cancel()
        here.open()


async def test_checkpoints_are_looked_for_where_the_prompt_begins(
    steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[str, int]] = []

    async def none(self: StateKeeper, request: GenerationRequest, start: int) -> None:
        looked.append((request.checkpoint, start))

    monkeypatch.setattr(StateKeeper, "checkpoint_of", none)
    async with keeping(steps, tokenizer) as kept:
        _, state = await kept.run(5, 6, max_tokens=5)
        start = StateReference("t", state)
        states, _ = await kept.keeper.load(
            [
                ask(5, start=start, checkpoint="a", reopened=True),
                ask(6, start=start, checkpoint="b", reopened=True),
                ask(5, checkpoint="c", reopened=True),
                ask(5, checkpoint="d"),
                ask(5, checkpoint="e", reopened=True, prompt_logprobs=1),
            ]
        )
    assert list(states) == [start]
    assert looked == [("a", 7), ("b", 7), ("c", 0)]


async def test_a_store_that_fails_costs_a_run_its_checkpoints_and_nothing_else(
    steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "CHECKPOINT_TOKENS", 4)
    async with keeping(steps, tokenizer) as kept:
        kept.store.close()
        made = await tokens_of(kept.engine.submit(ask(5, 6, max_tokens=20, checkpoint=new_state_id())))
        assert made == steps.expected((5, 6), 20)


async def test_a_checkpoint_whose_bytes_have_changed_is_not_used(
    steps: FakeSteps, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "CHECKPOINT_TOKENS", 10)
    asked = ask(5, 6, 7, sampling=RANDOM, max_tokens=60, ignore_eos=True, tenant="t", checkpoint=new_state_id())
    here = FakeSteps()
    async with keeping(here, tokenizer) as kept:
        whole = await tokens_of(kept.engine.submit(replace(asked, checkpoint="")))
        here.hold(after=25)  # see above
        run = kept.engine.submit(asked)
        async for _ in run:
            if run.usage.completion_tokens >= 25:
                break
        run.cancel()
        here.open()
        assert await tokens_of(kept.engine.submit(ask(5, max_tokens=2))), "the engine has ended the run"
        assert not kept.keeper._written, "nothing is remembered of a run that was cancelled"
        (document,) = await kept.store.call(lambda engine: engine.documents("t/checkpoints", "checkpoint", None, 9))
        assert (await kept.store.call(lambda engine: engine.usage("t"))).size == 0, "it is no part of the tenant's quota"
        body = bytearray(document.body)
        body[-200] ^= 1
        await kept.store.call(lambda engine: engine.write(replace(document, body=bytes(body)), None, ROOM))
        async with keeping(steps, tokenizer, kept.store) as there:
            (run,) = await there.engine.open([replace(asked, known=tuple(whole[:25]), reopened=True)])
            assert await tokens_of(run) == whole[25:]
            assert fed(steps) == 3 + 59, "all its tokens were fed again"
