"""The interface of all engines, whether they run in this process or in a pool of replicas."""

from typing import Protocol

from service.runtime.offered import Offered


class Engine(Protocol):
    """An engine. Call `start` on the event loop that uses the engine. Call `refused` for work (tokens of an encoder, runs of
    a decoder) that a gateway refused because this engine was full. This work is added to the offered load.
    """

    @property
    def healthy(self) -> bool: ...

    @property
    def alive(self) -> bool: ...

    @property
    def stuck_s(self) -> float: ...

    @property
    def offered(self) -> Offered: ...

    def refused(self, work: float, /) -> None: ...

    def start(self) -> None: ...

    async def stop(self) -> None: ...
