"""Any sequence of save, restore, fork, rewind, migrate, re-batch, cancel and crash gives the tokens and states of a plain run.

Two engines share a store. Each rule runs on one of them, with other runs beside it, and its result is compared with the plain
recurrence at once. At the end the whole store is checked.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule, run_state_machine_as_test

from service.generation.request import Delta, GenerationRequest
from service.generation.run import Run
from service.states.blob import pack, unpack
from service.states.record import Keep, Quota, StateRecord, StateReference, new_state_id
from tests.service.generation.fake_steps import VOCAB_SIZE
from tests.simulation import plain
from tests.simulation.clients import KINDS
from tests.simulation.engines import FINGERPRINT, NUMERICS, Chances, FailingSqlite, SimulatedEngine, SimulatedStore, opened
from tests.simulation.history import History, Kept, wrong_states, wrong_stream
from tests.simulation.loop import SimulatedLoop, end, virtual_time
from tests.simulation.mutants import MUTANTS

T = TypeVar("T")

TENANT = "t"
AMPLE = Quota(states=10_000, size=2**30)
PROMPTS = st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=40).map(tuple)
ENGINES = st.integers(0, 1)
ASKED = st.tuples(PROMPTS, st.sampled_from(KINDS), st.integers(1, 12), st.integers(0, 2**32))


class Sequences(RuleBasedStateMachine):
    """The states that were saved so far are in `saved`."""

    saved = Bundle("saved")

    @initialize(seed=st.integers(0, 2**32), slots=st.integers(1, 3), hot_bytes=st.sampled_from((0, 2**20)), cached=st.booleans())
    def begin(self, seed: int, slots: int, hot_bytes: int, cached: bool) -> None:
        self.loop = SimulatedLoop(seed)
        self.history = History()
        self.sizes = {"slots": slots, "hot_bytes": hot_bytes, "cache_bytes": 2**20 if cached else 0}
        self.states = FailingSqlite(self.loop, Chances())
        self.engines = [self._opened(at) for at in range(2)]

    def _opened(self, at: int) -> SimulatedEngine:
        self.store = SimulatedStore(self.states, f"engine {at}", self.loop, Chances())
        return opened(f"engine {at}", self.loop, self.store, Chances(), **self.sizes)

    # Rules ------------------------------------------------------------------------------------------

    @rule(target=saved, at=ENGINES, asked=ASKED, beside=st.lists(ASKED, max_size=3))
    def save(self, at: int, asked: Any, beside: list[Any]) -> Kept:
        return self.do(self._turn(at, asked, None, beside))

    @rule(target=saved, at=ENGINES, asked=ASKED, parent=saved, beside=st.lists(ASKED, max_size=3))
    def go_on(self, at: int, asked: Any, parent: Kept, beside: list[Any]) -> Kept:
        return self.do(self._turn(at, asked, parent, beside))

    @rule(target=saved, at=ENGINES, parent=saved)
    def draw_on_without_a_prompt(self, at: int, parent: Kept) -> Kept:
        return self.do(self._turn(at, ((), KINDS[1], 5, 3), parent, []))

    @rule(target=saved, parent=saved)
    def fork(self, parent: Kept) -> Kept:
        kept, record = self._kept(parent.ids, parent)
        self.do(self.store.call(lambda engine: engine.put(replace(record, origin="fork"), None, quota=AMPLE)))
        kept.acknowledged = True
        return kept

    @rule(target=saved, of=saved)
    def restore(self, of: Kept) -> Kept:
        """Download a state and upload it as a new one."""
        decoder = self.engines[0]._session.decoder
        downloaded = self.do(self.store.call(lambda engine: engine.blob(TENANT, of.id)))
        blob = unpack(downloaded, decoder, VOCAB_SIZE, FINGERPRINT)
        kept, record = self._kept(of.ids, None)
        uploaded = pack(replace(blob, id=kept.id, parent=None), [state.name for state in decoder.states])
        ids = plain.packed_ids(of.ids)
        self.do(self.store.call(lambda engine: engine.put(replace(record, origin="upload"), uploaded, ids=ids, quota=AMPLE)))
        kept.acknowledged = True
        return kept

    @rule(target=saved, at=ENGINES, of=saved, back=st.integers(1, 60))
    def rewind(self, at: int, of: Kept, back: int) -> Any:
        """Rewind by some tokens: feed the ids after the nearest earlier ancestor."""
        position = len(of.ids) - back
        ancestor: Kept | None = of
        while ancestor is not None and (len(ancestor.ids) >= position or ancestor.may_be_gone):
            ancestor = None if ancestor.parent is None else self.history.kept[ancestor.parent]
        first = 0 if ancestor is None else len(ancestor.ids)
        if position <= first:
            return multiple()
        return self.do(self._turn(at, (of.ids[first:position], KINDS[0], 0, 0), ancestor, []))

    @rule(target=saved, at=ENGINES, asked=ASKED, parent=saved, after=st.integers(0, 12), crashes=st.booleans())
    def migrate(self, at: int, asked: Any, parent: Kept, after: int, crashes: bool) -> Kept:
        """Kill the engine or cancel the run, and continue it in the other engine from the tokens that were read."""

        async def move() -> Kept:
            request, outcome = self._request(asked, parent)
            kept, keep = self._keep((*parent.ids, *request.prompt, *outcome.ids), parent)
            (run,) = await self.engines[at].open([replace(request, keep=keep)])
            read = await self._first(run, after)
            run.cancel()
            if crashes:
                self._crash(at)
            if not (read and read[-1].finish_reason is not None):
                known = tuple(token for delta in read for token in delta.token_ids)
                text = "".join(delta.text for delta in read)
                (resumed,) = await self.engines[1 - at].open([replace(request, keep=keep, known=known)])
                rest = await self._all(resumed)
                assert outcome.text == text + "".join(delta.text for delta in rest)
                assert (*known, *(token for delta in rest for token in delta.token_ids)) == outcome.ids
                assert (rest[-1].finish_reason, rest[-1].stop_reason) == (outcome.finish_reason, outcome.stop_reason)
            kept.acknowledged = True
            return kept

        return self.do(move())

    @rule(at=ENGINES, asked=ASKED, after=st.integers(0, 6), beside=st.lists(ASKED, max_size=3))
    def cancel(self, at: int, asked: Any, after: int, beside: list[Any]) -> None:
        async def leave() -> None:
            request, outcome = self._request(asked, None)
            _, keep = self._keep((*request.prompt, *outcome.ids), None)
            others = await self._others(at, beside)
            (run,) = await self.engines[at].open([replace(request, keep=keep)])
            read = await self._first(run, after)
            run.cancel()
            assert wrong_stream(read, outcome) is None
            await self._compare_all(others)

        self.do(leave())

    @rule(at=ENGINES)
    def crash(self, at: int) -> None:
        self.do(asyncio.sleep(1))
        self._crash(at)

    @rule(state=consumes(saved))
    def delete(self, state: Kept) -> None:
        state.may_be_gone = True
        self.do(self.store.call(lambda engine: engine.delete(TENANT, state.id)))

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "loop"):
            assert not self.loop.broken

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.do(asyncio.sleep(30))
            assert not [leak for engine in self.engines for leak in engine.leaks()]
            assert not list(wrong_states(self.history, self.states, evicts=False, lineages=True))
        finally:
            with virtual_time(self.loop):
                end(self.loop)

    # ------------------------------------------------------------------------------------------

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        with virtual_time(self.loop):
            return self.loop.run_until_complete(asyncio.wait_for(work, 900))

    def _crash(self, at: int) -> None:
        self.engines[at].dead = True
        self.engines[at] = self._opened(at)

    async def _turn(self, at: int, asked: Any, parent: Kept | None, beside: list[Any]) -> Kept:
        request, outcome = self._request(asked, parent)
        kept, keep = self._keep((*(() if parent is None else parent.ids), *request.prompt, *outcome.ids), parent)
        others = await self._others(at, beside)
        (run,) = await self.engines[at].open([replace(request, keep=keep)])
        self._compare(await self._all(run), outcome)
        await self._compare_all(others)
        kept.acknowledged = True
        return kept

    def _request(self, asked: Any, parent: Kept | None) -> tuple[GenerationRequest, plain.Outcome]:
        prompt, kind, max_tokens, seed = asked
        request = GenerationRequest(
            prompt=prompt, max_tokens=max_tokens, start=None if parent is None else StateReference(TENANT, parent.id), tenant=TENANT, **kind
        )
        request = replace(request, sampling=replace(request.sampling, seed=seed))
        return request, plain.outcome(request, () if parent is None else parent.ids)

    def _keep(self, ids: tuple[int, ...], parent: Kept | None) -> tuple[Kept, Keep]:
        kept, record = self._kept(ids, parent)
        return kept, Keep(record=record, quota=AMPLE)

    def _kept(self, ids: tuple[int, ...], parent: Kept | None) -> tuple[Kept, StateRecord]:
        kept = Kept(new_state_id(), TENANT, ids, None if parent is None else parent.id)
        self.history.expect(kept)
        record = StateRecord(
            id=kept.id,
            tenant=TENANT,
            model="toy",
            fingerprint=FINGERPRINT,
            numerics=NUMERICS,
            position=len(ids),
            parent=kept.parent,
            origin="prompt",
            created=self.loop.epoch,
            used=self.loop.epoch,
        )
        return kept, record

    async def _others(self, at: int, beside: list[Any]) -> list[tuple[Run, plain.Outcome]]:
        """Runs of other clients that share the batch."""
        others = []
        for number, asked in enumerate(beside):
            request, outcome = self._request(asked, None)
            (run,) = await self.engines[at].open([replace(request, client=f"other {number}")])
            others.append((run, outcome))
        return others

    async def _compare_all(self, others: list[tuple[Run, plain.Outcome]]) -> None:
        for run, outcome in others:
            self._compare(await self._all(run), outcome)

    async def _first(self, run: Run, tokens: int) -> list[Delta]:
        """Read so many tokens of a run."""
        read: list[Delta] = []
        while sum(len(delta.token_ids) for delta in read) < tokens:
            try:
                read.append(await anext(run))
            except StopAsyncIteration:
                break
        return read

    async def _all(self, run: Run) -> list[Delta]:
        return [delta async for delta in run]

    def _compare(self, read: list[Delta], outcome: plain.Outcome) -> None:
        assert read[-1].finish_reason is not None
        assert wrong_stream(read, outcome) is None


def _run(*phases: Phase) -> None:
    run_state_machine_as_test(
        Sequences,
        settings=settings(
            max_examples=40,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_sequence_gives_the_tokens_and_states_of_a_plain_run() -> None:
    _run(Phase.generate, Phase.shrink)


@pytest.mark.parametrize("mutant", ["a run is resumed from before its last token", "a grammar is restarted on resume"])
def test_a_planted_bug_is_found_by_sequences(mutant: str) -> None:
    with MUTANTS[mutant](), pytest.raises(Exception):  # noqa: B017, PT011  # whatever it breaks
        _run(Phase.generate)
