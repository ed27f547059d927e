"""Texts of all lengths on few threads."""

import asyncio
import threading
import weakref
from functools import partial

import pytest

from service.tokenization.threads import Tokenizers
from tests.service.fakes import PATIENCE_S, until


class Text:
    """A text of which one can see whether it is still in memory."""


async def test_short_texts_do_not_wait_for_long_ones() -> None:
    threads, gate, running = Tokenizers(1), threading.Event(), []

    def long() -> int:
        running.append(1)
        assert gate.wait(PATIENCE_S)
        return 1

    waiting = [asyncio.create_task(threads.run(long, size=1_000_000, client=str(n))) for n in range(6)]
    async with asyncio.timeout(PATIENCE_S):
        while not running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(10):
            assert await threads.run(lambda: "short", size=10_000, client="") == "short"
    assert len(running) == 1, "long ones have one thread at most"
    gate.set()
    assert await asyncio.gather(*waiting) == [1] * 6
    threads.close()


async def all_busy(threads: Tokenizers, gate: threading.Event) -> "list[asyncio.Task[bool]]":
    """Work that occupies both threads until the gate opens."""
    begun: list[int] = []
    held = [asyncio.create_task(threads.run(lambda: begun.append(1) or gate.wait(PATIENCE_S), size=10_000, client="")) for _ in range(2)]  # type: ignore[func-returns-value]
    await until(lambda: len(begun) == 2)
    return held


async def test_small_work_waits_for_no_thread() -> None:
    assert await Tokenizers(1).run(threading.current_thread, size=4_000, client="") is threading.current_thread()


async def test_an_error_is_its_callers_and_what_was_cancelled_does_not_run() -> None:
    threads, gate, ran = Tokenizers(1), threading.Event(), []
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0, size=10_000, client="")
    held = await all_busy(threads, gate)
    text = Text()
    released = weakref.ref(text)
    left = asyncio.create_task(threads.run(partial(ran.append, text), size=10_000, client=""))
    del text
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    del left
    await until(lambda: released() is None)  # it is not kept until its turn
    gate.set()
    await asyncio.gather(*held)
    await threads.run(lambda: None, size=10_000, client="")
    assert not ran
    threads.close()
