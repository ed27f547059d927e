"""Requests that wait end at their deadlines, whatever the order in which they came."""

import time
from typing import Any

from service.encoding.pending import Deadlines, PendingRequest
from service.encoding.request import EncodeTask
from service.errors import DeadlineExceeded
from service.tokenization.texts import Encoded
from tests.service.fakes import until


def pending(after_s: float, name: str, ended: list[Any]) -> PendingRequest:
    now = time.monotonic()
    task = EncodeTask(inputs=[Encoded([1], None, 1)], outputs=("o",), deadline=now + after_s)
    return PendingRequest(task, now, lambda result: ended.append((name, result)))


async def test_each_ends_at_its_deadline_and_others_wait_on() -> None:
    deadlines, ended = Deadlines(), []
    late, soon, sooner, done, left = (pending(after_s, f"{after_s}", ended) for after_s in (600, 0.05, 0.01, 0.02, 0.03))
    for request in (late, soon, sooner, done, left):
        deadlines.add(request)
    done.set(0, "a row")  # type: ignore[arg-type]
    left.cancel()
    await until(lambda: len(ended) == 3)
    assert ended[0] == ("0.02", ["a row"])
    assert {name for name, _ in ended[1:]} == {"0.01", "0.05"}
    assert all(isinstance(result, DeadlineExceeded) for _, result in ended[1:])
    assert all(time.monotonic() >= request.task.deadline for request in (sooner, soon))
    assert len(deadlines) == 1
    late.cancel()
    assert len(deadlines) == 0
