"""Bytes that the requests of one process hold at the same time, shared by host.

A host may hold as many bytes as are free, and a request as many as its host has left, so there is always room for another host, and beside
large requests for a small one. (Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches, 1998.)
"""

from collections.abc import Callable

from service.errors import Overloaded

_RETRY_AFTER_S = 1.0


class ByteShares:
    """`what` names the bytes in errors; `limit` returns the limit on their sum. For the event loop only."""

    def __init__(self, what: str, limit: Callable[[], int]) -> None:
        self.used = 0
        self._what = what
        self._limit = limit
        self._by_host: dict[str, int] = {}

    def take(self, host: str, size: int, held: int = 0) -> None:
        """Take `size` more bytes for a request that holds `held`. Raises Overloaded, and takes none, over a share."""
        limit = self._limit()
        free = limit - self.used - size
        hosts = self._by_host.get(host, 0) + size
        alone = self.used == held and free >= 0
        if hosts + held + size > free and not alone:
            raise Overloaded(
                f"Model is overloaded: the {self._what} of running requests hold {self.used} bytes of {limit}, {hosts - size} of them for "
                f"this client, whose share leaves no room for {size} more",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.used += size
        self._by_host[host] = hosts

    def give(self, host: str, size: int) -> None:
        """Return bytes that were taken."""
        if size:
            self.used -= size
            self._by_host[host] -= size
            if not self._by_host[host]:
                del self._by_host[host]
