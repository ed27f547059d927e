"""Divides the memory for bodies, or for large answers, among clients. Sizes are in bytes.

A client may hold at most as many bytes as remain free. In this comparison, the bytes that its current request already holds count twice.
So there is always room for another client, and for a small request of the same client. If only one request holds bytes, this request may
use the whole limit.
(Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches, 1998.)
"""

from collections.abc import Callable

from service.errors import Overloaded

_RETRY_AFTER_S = 1.0


class ByteShares:
    """A number of bytes that clients share. `limit` returns this number, and `what` names the bytes in errors. Used on the event loop
    only.
    """

    def __init__(self, what: str, limit: Callable[[], int]) -> None:
        self.used = 0
        self._what = what
        self._limit = limit
        self._by_host: dict[str, int] = {}

    def take(self, host: str, size: int, held: int = 0) -> None:
        """Reserve `size` more bytes for a request of client `host`; the request already holds `held` bytes. If this exceeds the client's
        share, raises Overloaded and reserves nothing.
        """
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
        """Release bytes that `take` reserved."""
        if size:
            self.used -= size
            self._by_host[host] -= size
            if not self._by_host[host]:
                del self._by_host[host]
