"""The caller's end of a run: what waits to be taken, and since when."""

import time

from service.generation.request import Delta, GenerationRequest, Sampling, Usage
from service.generation.run import Run


async def test_what_waits_is_joined_and_unread_since_the_first_of_it_came() -> None:
    run = Run(GenerationRequest(prompt=(1,), sampling=Sampling(seed=0), max_tokens=9), Usage(1), lambda run: None)
    assert run.unread_since is None, "nothing has come, however long that takes"
    begun = time.monotonic()
    run.give(Delta("a", (1,)))
    first = run.unread_since
    run.give(Delta("b", (2,), (), "stop"))
    assert first is not None
    assert begun <= first
    assert run.unread_since == first
    assert run.take() == Delta("ab", (1, 2), (), "stop")
    assert run.unread_since is None
