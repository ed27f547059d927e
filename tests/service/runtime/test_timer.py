"""The alarm rings once, when nothing has set it anew or cleared it for so long."""

import asyncio

from service.runtime.timer import ResettableTimer
from tests.service.fakes import PATIENCE_S, until

SOON_S = 0.02


async def test_it_rings_when_the_last_setting_is_over() -> None:
    rung = asyncio.Event()
    alarm = ResettableTimer(rung.set)
    loop = asyncio.get_running_loop()
    for _ in range(3):
        alarm.set(2 * SOON_S)
        last = loop.time()
        await asyncio.sleep(SOON_S)
    await asyncio.wait_for(rung.wait(), PATIENCE_S)
    assert loop.time() - last >= 2 * SOON_S


async def test_cleared_or_stopped_it_does_not_ring() -> None:
    rung: list[str] = []
    cleared, stopped, again = (ResettableTimer(lambda name=name: rung.append(name)) for name in ("cleared", "stopped", "again"))  # type: ignore[misc]
    for alarm in (cleared, stopped, again):
        alarm.set(SOON_S)
    cleared.clear()
    stopped.stop()
    again.clear()
    again.set(SOON_S)
    await until(lambda: rung)
    assert rung == ["again"]
