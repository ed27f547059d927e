"""Memory of bodies or of large answers, in bytes, divided among clients.

A client may hold as many bytes as are free, and one request as many as its client has left. So there is always room for another client, and
for a small request of the same client. (Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches, 1998.)
"""

from collections.abc import Callable

from service.errors import Overloaded

_RETRY_AFTER_S = 1.0


class ByteShares:
    """`what` names the bytes in errors; `limit` returns the limit of their sum. Used on the event loop only."""

    def __init__(self, what: str, limit: Callable[[], int]) -> None:
        self.used = 0
        self._what = what
        self._limit = limit
        self._by_host: dict[str, int] = {}

    def take(self, host: str, size: int, held: int = 0) -> None:
        """Take `size` more bytes for a request of `host` that holds `held`. Raises Overloaded, and takes none, over the share."""
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
