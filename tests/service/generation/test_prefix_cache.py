"""The states after earlier prompts: what is found, for whom, and that an answer is the same with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.generation.request import Sampling
from service.generation.saved.prefix_cache import LEAST_TOKENS, PrefixCache, Salt
from service.generation.state import State
from tests.service.generation.fake_steps import FakeSteps
from tests.service.generation.test_engine import all_of, ask, running, tokens_of

RANDOM = Sampling(seed=3, temperature=1.0, top_k=50, repetition_penalty=1.2)
PROMPT = tuple(range(10, 60))
OURS = Salt("ours", "", "")
SIZE = 4 * (6 + 8)


def state(position: int) -> State:
    return State(tensors=(np.zeros(6, np.float32),), position=position, logits=np.zeros(8, np.float32), fingerprint="f")


def fed(steps: FakeSteps, since: int = 0) -> int:
    return sum(len(row) for call in steps.calls[since:] for row in call)


def test_the_longest_known_beginning_is_found() -> None:
    cache = PrefixCache(10 * SIZE)
    cache.put(OURS, PROMPT[:20], state(20))
    cache.put(OURS, PROMPT[:30], state(30))
    cache.put(OURS, (*PROMPT[:29], 1), state(-1))
    for most, found in ((50, 30), (30, 30), (29, 20), (20, 20)):
        entry, miss = cache.find(OURS, PROMPT, most)
        assert (entry and entry.state.position, miss) == (found, None)


def test_a_miss_has_its_reason() -> None:
    cache = PrefixCache(2 * SIZE)
    assert PrefixCache(0).find(OURS, PROMPT, 50) == (None, "disabled")
    assert cache.find(OURS, PROMPT, LEAST_TOKENS - 1) == (None, "short")
    assert cache.find(OURS, PROMPT, 50) == (None, "new")
    cache.put(OURS, PROMPT, state(50))
    assert cache.find(OURS, (*PROMPT[:40], 1, 2), 42) == (None, "boundary")
    for other in (OURS._replace(own="salted"), Salt("theirs", "", "")):
        assert cache.find(other, PROMPT, 50) == (None, "new"), "the reason does not reveal that the prompt was sent with another salt"
    cache.put(OURS, PROMPT[:20], state(20))
    cache.put(OURS, PROMPT[5:], state(45))
    assert cache.find(OURS, PROMPT, 50)[0] is not None, "its first 20 tokens"
    cache.put(OURS, PROMPT[6:], state(44))
    assert cache.find(OURS, PROMPT[5:], 45) == (None, "evicted")


def test_memory_is_bounded_and_what_was_used_stays() -> None:
    cache = PrefixCache(10 * SIZE)
    for first in range(500):
        cache.put(OURS, (first, *PROMPT), state(51))
        cache.find(OURS, (0, *PROMPT), 51)
    assert sum(cache.has(OURS, (first, *PROMPT)) for first in range(500)) == 10
    assert cache._lengths == {OURS: {51: 10}}
    assert cache.find(OURS, (0, *PROMPT), 51)[0] is not None
    cache.put(OURS, PROMPT, replace(state(50), tensors=(np.zeros(10_000, np.float32),)))
    assert not cache.has(OURS, PROMPT), "it is larger than all the memory"


HARD: dict[str, dict[str, Any]] = {
    "random": {"sampling": RANDOM},
    "logprobs": {"sampling": RANDOM, "top_logprobs": 2},
    "stop": {"sampling": RANDOM, "stop": ("e", "o")},
}


@pytest.mark.parametrize("hard", HARD)
async def test_a_hit_feeds_the_rest_alone_and_changes_nothing(steps: FakeSteps, tokenizer: Path, hard: str) -> None:
    asked = ask(*PROMPT, max_tokens=9, **HARD[hard])
    async with running(FakeSteps(), tokenizer) as engine:
        plain = await all_of(engine.submit(asked))
        longer = await all_of(engine.submit(replace(asked, prompt=(*PROMPT, *plain.token_ids, 5))))
    async with running(steps, tokenizer, prefix_cache_bytes=2**20) as engine:
        assert await all_of(engine.submit(asked)) == plain
        calls = len(steps.calls)
        run = engine.submit(asked)
        assert await all_of(run) == plain
        assert run.usage.cached_tokens == len(PROMPT)
        assert fed(steps, calls) == len(plain.token_ids) - 1, "the last token is not fed"
        run = engine.submit(replace(asked, prompt=(*PROMPT, *plain.token_ids, 5)))
        assert await all_of(run) == longer
        assert run.usage.cached_tokens == len(PROMPT) + len(plain.token_ids) - 1, "what a completion fed is a boundary too"


async def test_nobody_gets_a_state_of_another_tenant_or_salt(steps: FakeSteps, tokenizer: Path) -> None:
    async with running(steps, tokenizer, prefix_cache_bytes=2**20) as engine:
        await tokens_of(engine.submit(ask(*PROMPT, tenant="a", cache_salt="s")))
        for tenant, salt, found in (("b", "s", 0), ("a", "t", 0), ("a", "s", len(PROMPT))):
            run = engine.submit(ask(*PROMPT, tenant=tenant, cache_salt=salt))
            await tokens_of(run)
            assert run.usage.cached_tokens == found


async def test_a_prompt_that_is_not_drawn_from_is_fed_where_its_state_is_not_needed(steps: FakeSteps, tokenizer: Path) -> None:
    """With max_tokens 0 there is nothing to draw, and with log-probabilities every token is fed."""
    async with running(steps, tokenizer, prefix_cache_bytes=2**20) as engine:
        await tokens_of(engine.submit(ask(*PROMPT)))
        made = await all_of(engine.submit(ask(*PROMPT, max_tokens=0)))
        assert (made.token_ids, made.finish_reason) == ((), "length")
        run = engine.submit(ask(*PROMPT, prompt_logprobs=0))
        await tokens_of(run)
    assert run.usage.cached_tokens == 0
    assert len(run.prompt_logprobs) == len(PROMPT)
