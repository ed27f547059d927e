"""Virtual time and the seeded scheduler."""

import asyncio
import time

import pytest

from tests.simulation.loop import Deadlock, SimulatedLoop, run


def test_time_passes_at_once_and_all_clocks_agree() -> None:
    loop = SimulatedLoop(0)

    async def sleep() -> tuple[float, ...]:
        before = time.monotonic(), time.perf_counter(), time.time(), loop.time()
        await asyncio.sleep(3600)
        after = time.monotonic(), time.perf_counter(), time.time(), loop.time()
        return tuple(late - early for late, early in zip(after, before, strict=True))

    began = time.perf_counter()
    assert run(loop, sleep()) == (3600.0,) * 4
    assert time.perf_counter() - began < 60


def _order(seed: int) -> list[int]:
    loop, order = SimulatedLoop(seed), list[int]()

    async def append(number: int) -> None:
        order.append(number)

    async def main() -> None:
        await asyncio.gather(*(append(number) for number in range(20)))

    run(loop, main())
    return order


def test_a_seed_decides_the_order_of_tasks() -> None:
    assert _order(1) == _order(1)
    assert _order(1) != _order(2) != list(range(20))


def test_callbacks_of_one_process_keep_their_order_and_those_of_two_do_not() -> None:
    loop, order = SimulatedLoop(3), list[tuple[str, int]]()

    async def main() -> None:
        for process in ("a", "b"):
            with loop.in_process(process):
                for number in range(20):
                    loop.call_soon_threadsafe(order.append, (process, number))
        await asyncio.sleep(1)

    run(loop, main())
    for process in ("a", "b"):
        assert [number for where, number in order if where == process] == list(range(20))
    assert order != sorted(order)


def test_waiting_for_nothing_is_an_error() -> None:
    loop = SimulatedLoop(0)

    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(loop, wait())


def test_a_call_in_another_thread_takes_time_and_gives_its_error() -> None:
    loop = SimulatedLoop(0)

    def fail() -> None:
        raise LookupError("here")

    async def main() -> float:
        began = loop.time()
        assert await asyncio.to_thread(sum, (1, 2)) == 3
        with pytest.raises(LookupError):
            await asyncio.to_thread(fail)
        return loop.time() - began

    assert run(loop, main()) > 0
