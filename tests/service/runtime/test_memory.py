"""When memory is given back."""

import threading

import pytest

from service.runtime.memory import Release
from tests.service.fakes import PATIENCE_S


def test_many_large_requests_give_memory_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed, count = threading.Event(), []

    def trim() -> None:
        count.append(threading.current_thread())
        trimmed.set()

    release = Release(trim)
    for _ in range(100):
        release.request()
    assert trimmed.wait(PATIENCE_S)
    assert len(count) == 1
    assert count[0] is not threading.main_thread()
