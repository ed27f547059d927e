"""The runs of a request, as they are read: together, in time, and to the end."""

import asyncio

import pytest

from service.call import Call
from service.errors import RuntimeFailed
from service.generation.request import Delta, GenerationRequest, Sampling
from service.generation.run import Run
from service.generation.runs import Runs
from service.telemetry.usage import Usage
from tests.service.fakes import PATIENCE_S

REQUEST = GenerationRequest(prompt=(1,), sampling=Sampling(seed=0), max_tokens=9)


def begun(n: int) -> tuple[Runs, list[Run]]:
    """So many runs that nobody works on, and their reader."""
    made = [Run(REQUEST, Usage(1), lambda run: None) for _ in range(n)]
    return Runs(made, Call("id", 0.0), n=n), made


@pytest.mark.parametrize("first_taken", [True, False])
async def test_what_befell_a_run_is_told_after_what_it_made(first_taken: bool) -> None:
    runs, (run,) = begun(1)
    async with asyncio.timeout(PATIENCE_S):
        run.give(Delta("a", (1,)))
        if first_taken:
            assert [delta.text for _, delta in await runs.take()] == ["a"]
            run.give(Delta("b", (2,)))
        run.fail(RuntimeFailed("no memory"))
        assert [delta.text for _, delta in await runs.take(interval_s=5)] == ["b" if first_taken else "a"]
        with pytest.raises(RuntimeFailed):
            await runs.take()
    assert run.cancelled


async def test_a_whole_answer_fails_with_the_first_run_that_fails() -> None:
    runs, (one, other) = begun(2)
    whole = asyncio.create_task(runs.all())
    await asyncio.sleep(0)
    one.give(Delta("a", (1,)))
    other.give(Delta("b", (1,)))
    await asyncio.sleep(0)
    one.give(Delta("a", (1,)))
    one.fail(RuntimeFailed("no memory"))
    with pytest.raises(RuntimeFailed):
        await asyncio.wait_for(whole, PATIENCE_S)
    assert other.cancelled


async def test_an_end_does_not_wait_for_the_interval() -> None:
    runs, (run,) = begun(1)
    async with asyncio.timeout(PATIENCE_S):
        run.give(Delta("a", (1,)))
        await runs.take(interval_s=3600)
        taking = asyncio.create_task(runs.take(interval_s=3600))
        run.give(Delta("b", (2,)))
        await asyncio.sleep(0)
        assert not taking.done()
        run.give(Delta("c", (3,), finish_reason="length"))
        assert [(delta.text, delta.finish_reason) for _, delta in await taking] == [("bc", "length")]
    assert runs.done
