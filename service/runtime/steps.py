"""Work of a request on a thread, which ends soon after its client has left."""

import asyncio
import threading
from collections.abc import Iterable
from typing import TypeVar

Result = TypeVar("Result")


async def run_in_steps(work: Iterable[Result]) -> list[Result]:
    """Return the results of `work`, which is done on a thread. If the caller is cancelled, the thread ends with the current step."""
    cancelled = threading.Event()

    def run() -> list[Result]:
        done = []
        for result in work:
            done.append(result)
            if cancelled.is_set():
                break
        return done

    try:
        return await asyncio.to_thread(run)
    finally:
        cancelled.set()
