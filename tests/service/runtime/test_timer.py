"""The alarm rings once, when nothing has set it anew or cleared it for so long."""

import asyncio

import pytest

from service.runtime.timer import ResettableTimer
from tests.service.fakes import PATIENCE_S, put_forward, until

SOON_S = 0.02


async def test_it_rings_when_the_last_setting_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    rung, forward = asyncio.Event(), put_forward(monkeypatch)
    alarm = ResettableTimer(rung.set)
    for _ in range(3):
        alarm.set(1000)
        await forward(700)
        assert not rung.is_set()
    await forward(200)
    assert not rung.is_set()
    await forward(200)
    await asyncio.wait_for(rung.wait(), PATIENCE_S)


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
