"""States after long prompts, which engines find in the store of each other: what is found, for whom, and within which bounds."""

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.errors import DocumentMoved
from service.generation.engine import GeneratorEngine
from service.generation.request import GenerationRequest, Sampling
from service.generation.run import Run
from service.generation.saved import shared_prefixes
from service.generation.saved.packing import Packing
from service.generation.saved.prefix_cache import Salt
from service.generation.saved.shared_prefixes import SharedPrefixes
from service.generation.saved.writer import NO_QUOTA
from service.generation.state import State
from service.states.engine import StateEngine
from service.states.record import Document
from service.states.sqlite import SqliteEngine
from service.states.store import Store
from service.telemetry.metrics import Metrics
from tests.service.fakes import PATIENCE_S
from tests.service.generation.fake_steps import VOCAB_SIZE, FakeSteps
from tests.service.generation.test_engine import all_of, ask, running
from tests.service.generation.test_keeping import fed

RANDOM = Sampling(seed=3, temperature=1.0, top_k=50, repetition_penalty=1.2)
LEAST = 32
PROMPT = tuple(range(10, 60))
TENANT = "t/prefixes"
SALT = Salt("t", "", "")


class Engine:
    """An engine of one process."""

    def __init__(self, engine: GeneratorEngine, steps: FakeSteps, metrics: Metrics) -> None:
        self.engine, self.steps, self._metrics = engine, steps, metrics

    async def open(self, request: GenerationRequest) -> Run:
        (run,) = await self.engine.open([request])
        return run

    async def cached(self, request: GenerationRequest) -> int:
        """Run the request, and return how many tokens of its prompt were not fed."""
        run = await self.open(request)
        await all_of(run)
        return run.usage.cached_tokens

    def misses(self, reason: str) -> float:
        found = self._metrics.registry.get_sample_value("attnserve_prefix_cache_misses_total", {"model": "fake", "reason": reason})
        assert found is not None
        return found


@pytest.fixture
def store() -> Iterator[Store]:
    opened = Store(SqliteEngine(None))
    yield opened
    opened.close()


@asynccontextmanager
async def process(
    store: Store, tokenizer: Path, *, fingerprint: str = "fake", numerics: str = "ab", room: int = 2**20
) -> AsyncIterator[Engine]:
    steps, metrics = FakeSteps(), Metrics()
    steps.fingerprint = fingerprint
    shared = SharedPrefixes(store, packing(fingerprint, numerics), room, LEAST)
    async with running(steps, tokenizer, numerics=numerics, shared=shared, metrics=metrics, prefix_cache_bytes=2**20) as engine:
        yield Engine(engine, steps, metrics)


def packing(fingerprint: str = "fake", numerics: str = "ab") -> Packing:
    return Packing(FakeSteps().decoder, vocab_size=VOCAB_SIZE, fingerprint=fingerprint, numerics=numerics)


def asked(*prompt: int, **options: Any) -> GenerationRequest:
    return ask(*prompt, **{"sampling": RANDOM, "max_tokens": 5, "ignore_eos": True, "tenant": "t", **options})


async def states(store: Store, tenant: str = TENANT) -> list[Document]:
    return await store.call(lambda engine: engine.documents(tenant, "prefix", None, 100))


async def test_a_prompt_that_one_process_has_read_goes_on_in_another_with_the_same_bits(store: Store, tokenizer: Path) -> None:
    longer = asked(*PROMPT, 5, 6, 7, max_tokens=9, top_logprobs=2)
    async with process(store, tokenizer) as here, process(store, tokenizer) as there:
        plain = await all_of(await here.open(longer))
        assert await here.cached(replace(longer, prompt=PROMPT, tenant="u")) == 0
        assert not await states(store, "u")
        async with process(Store(SqliteEngine(None)), tokenizer) as alone:
            assert await all_of(await alone.open(replace(longer, prompt=(*PROMPT, 8)))) is not None
            whole = await all_of(await alone.open(replace(longer, prompt=(*longer.prompt, *plain.token_ids, 9))))
        assert len(await states(store)) == 1, "what the completion fed is not much longer"
        run = await there.open(longer)
        assert await all_of(run) == plain
        assert run.usage.cached_tokens == len(longer.prompt)
        assert fed(there.steps) == 8, "the prompt was not fed"
        run = await there.open(replace(longer, prompt=(*longer.prompt, *plain.token_ids, 9)))
        assert await all_of(run) == whole


async def test_a_state_is_found_only_for_what_it_was_made_for(store: Store, tokenizer: Path) -> None:
    async with process(store, tokenizer) as here:
        assert await here.cached(asked(*PROMPT)) == 0
        assert len(await states(store)) == 1
    longer = asked(*PROMPT, 3)
    async with process(store, tokenizer) as there:
        assert await there.cached(replace(longer, tenant="u")) == 0
        assert await there.cached(replace(longer, cache_salt="s")) == 0
        assert there.misses("new") == 2
        assert await there.cached(replace(longer, prompt=(*PROMPT[:-1], 9, 3))) == 0
        assert await there.cached(longer) == len(PROMPT)
    async with process(store, tokenizer, numerics="cd") as there:
        assert await there.cached(longer) == 0
        assert there.misses("numerics") == 1
    async with process(store, tokenizer, fingerprint="another") as there:
        assert await there.cached(longer) == 0
        assert there.misses("model") == 1
        assert await there.cached(longer) == len(longer.prompt), "its own state is beside that of the other model"


async def test_bytes_that_have_changed_or_are_gone_are_not_continued(store: Store, tokenizer: Path) -> None:
    async with process(store, tokenizer) as here:
        whole = await all_of(await here.open(asked(*PROMPT)))
    (document,) = await states(store)
    body = bytearray(document.body)
    body[-200] ^= 1
    await store.call(lambda engine: engine.write(replace(document, body=bytes(body)), None, NO_QUOTA))
    async with process(store, tokenizer) as there:
        run = await there.open(asked(*PROMPT))
        assert (await all_of(run), run.usage.cached_tokens) == (whole, 0)
        assert there.misses("evicted") == 1
    await store.call(lambda engine: engine.erase(TENANT, "prefix", document.id, None))
    async with process(store, tokenizer) as there:
        assert await there.cached(asked(*PROMPT)) == 0
        assert there.misses("evicted") == 1


async def test_a_prompt_after_a_named_state_is_found_by_that_state_alone(store: Store) -> None:
    shared, state = SharedPrefixes(store, packing(), 2**20, LEAST), made(7 + len(PROMPT))
    shared.put(Salt("t", "", "state_1"), PROMPT, state, packing().whole(made(7), None, (1, 2)))
    found = await shared.find(Salt("t", "", "state_1"), PROMPT, 50, 0)
    assert found.state is not None
    assert found.length == len(PROMPT)
    assert found.state.position == 7 + len(PROMPT)
    assert found.state.recent == (1, 2, *PROMPT)
    assert (await shared.find(SALT, PROMPT, 50, 0)).miss is None
    assert (await shared.find(Salt("t", "", "state_1"), PROMPT, 49, 0)).state is None, "it is longer than what may be used"


def made(position: int) -> State:
    tensors, logits = FakeSteps().states(1).read(0, 0), FakeSteps().logits(FakeSteps().states(1).read(0, 0)[0])
    tensors[1][:] = position
    return State(tensors=tuple(tensors), position=position, logits=logits, fingerprint="fake")


async def test_room_is_bounded_and_what_was_used_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(packing().seal("state_" + 32 * "0", packing().whole(made(50), None, PROMPT), 0.0))
    shared = SharedPrefixes(store, packing(), 3 * size + 100, LEAST)
    for first in range(6):
        shared.put(SALT, (first, *PROMPT), made(51), None)
        assert (await shared.find(SALT, (0, *PROMPT), 51, 0)).state is not None, "it was used last"
    assert len(await states(store)) == 3
    assert (await shared.find(SALT, (2, *PROMPT), 51, 0)).state is None
    assert (await shared.find(SALT, (5, *PROMPT), 51, 0)).state is not None
    monkeypatch.setattr(shared_prefixes, "_MOST_STATES", 2)
    shared.put(SALT, (7, *PROMPT), made(51), None)
    assert len(await states(store)) == 2
    SharedPrefixes(store, packing(), size - 1, LEAST).put(SALT, (8, *PROMPT), made(51), None)
    assert len(await states(store)) == 2, "it is larger than all the room"
    usage = await store.call(lambda engine: engine.usage("t"))
    assert usage.size == 0, "the tenant's own quota is not touched"


async def test_states_whose_time_is_over_leave_the_index(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedPrefixes(store, packing(), 2**20, LEAST)
    shared.put(SALT, (0, *PROMPT), made(51), None)
    await states(store)
    later = time.time() + shared_prefixes._LIFE_S + 1
    monkeypatch.setattr(shared_prefixes.time, "time", lambda: later)
    shared.put(SALT, (1, *PROMPT), made(51), None)
    assert len(await states(store)) == 1
    assert (await shared.find(SALT, (0, *PROMPT), 51, 0)).state is None
    assert (await shared.find(SALT, (1, *PROMPT), 51, 0)).state is not None


def add(engine: StateEngine, shared: SharedPrefixes, tokens: tuple[int, ...], state: State) -> None:
    """Write `state` under the hash of `tokens`, which need not be those that were fed to it."""
    ((length, content),) = shared_prefixes.hashes(tokens, [len(tokens)])
    now = time.time()
    entry = shared_prefixes._Entry(content, shared_prefixes._salt(SALT), shared._model, shared._numerics, length, 0, now, 0.0)
    body = packing().seal(entry.id, state, 0.0)
    shared._add(engine, TENANT, entry._replace(size=len(body)), body)


async def test_a_state_of_other_tokens_is_not_continued_even_if_its_hash_is_equal(store: Store) -> None:
    shared = SharedPrefixes(store, packing(), 2**20, LEAST)
    for last, found in ((9, False), (1, True)):
        state = packing().whole(made(51), None, (*PROMPT, last))
        await store.call(lambda engine, state=state: add(engine, shared, (*PROMPT, 1), state))  # type: ignore[misc]
        assert ((await shared.find(SALT, (*PROMPT, 1), 51, 0)).state is not None) == found


async def test_few_states_are_written_at_once(store: Store) -> None:
    shared, opened = SharedPrefixes(store, packing(), 2**20, LEAST), threading.Event()
    store.submit(lambda _: opened.wait(PATIENCE_S))
    begun = [shared.put(SALT, (first, *PROMPT), made(51), None) for first in range(shared_prefixes._MOST_WRITING + 1)]
    opened.set()
    assert begun == [True] * shared_prefixes._MOST_WRITING + [False]
    assert len(await states(store)) == shared_prefixes._MOST_WRITING
    assert shared.put(SALT, (9, *PROMPT), made(51), None)


class Contended(SqliteEngine):
    """A store without transactions, in which another process writes the index between the read and the write."""

    moves = 0
    meanwhile: Any = None

    def write(self, document: Document, expected: int | None, quota: Any) -> int:
        if document.kind == "prefixes" and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile(self)
        try:
            return super().write(document, expected, quota)
        except DocumentMoved:
            self.moves += 1
            raise


async def test_two_processes_that_write_the_index_at_once_both_are_in_it() -> None:
    engine = Contended(None)
    store = Store(engine)
    shared, other = (SharedPrefixes(store, packing(), 2**20, LEAST) for _ in range(2))

    def meanwhile(engine: StateEngine) -> None:
        add(engine, other, (1, *PROMPT), packing().whole(made(51), None, (1, *PROMPT)))

    engine.meanwhile = meanwhile
    shared.put(SALT, (0, *PROMPT), made(51), None)
    for first in (0, 1):
        assert (await shared.find(SALT, (first, *PROMPT), 51, 0)).state is not None
    assert engine.moves == 1
    store.close()


async def test_a_store_that_fails_costs_nothing_but_the_states(store: Store, tokenizer: Path) -> None:
    async with process(store, tokenizer) as here:
        store.close()
        assert await here.cached(asked(*PROMPT)) == 0
        assert await here.cached(asked(*PROMPT)) == len(PROMPT), "its own memory has it"
