"""The interface of all engines, whether they run in this process or in a pool of replicas."""

from typing import Protocol


class Engine(Protocol):
    """An engine. Call `start` on the event loop that uses the engine."""

    @property
    def healthy(self) -> bool: ...

    @property
    def alive(self) -> bool: ...

    @property
    def stuck_s(self) -> float: ...

    def start(self) -> None: ...

    async def stop(self) -> None: ...
