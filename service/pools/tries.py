"""Which replicas one call of a gateway asks, one after another, and when it gives up: the only rule by which a pool is asked again."""

from collections.abc import Callable, Collection, Sequence

from service.errors import NotReady, Overloaded, ServiceError
from service.overload.promises import name_of
from service.pools.replicas import Key, Replica, ReplicaLost, Replicas

_NAMING_TOKENS = 64  # the first tokens of a request, which tell it from others


class Tries:
    """The replicas that were asked for one call, and whether to ask another one.

    A request has an *own* replica, the same in every gateway and whenever it is sent. It is asked last, and if it refuses too, it keeps a
    place for the client (`overload/promises.py`). A replica that keeps places refuses requests for which it is not asked last. If every
    replica kept places for all that it refuses, a client would find its place only by chance, and all would wait for places that nobody
    takes.
    """

    def __init__(self, replicas: Replicas, key: Key, request: Callable[[], str]) -> None:
        """`request` returns the result of `name_of_request`, which is seldom needed."""
        self.tried: list[Replica] = []
        self.last = False  # whether a refusal by the chosen replica is final
        self._replicas, self._key, self._request = replicas, key, request
        self._full: list[Replica] = []  # replicas in `tried` that had no free slot, but may queue the work
        self._refusals: list[Replica] = []
        self._lost = False

    def choose(self, choice: Callable[[Collection[Replica]], Replica], numerics: str = "") -> Replica:
        """Return the next replica: after a refusal the request's own one, unless that has refused and there is another one. Otherwise
        `choice` gets the replicas that were tried, and returns one.
        """
        if self._refusals:
            own = self._replicas.owner(self._request(), self._key, numerics=numerics)
            self.last = own not in self._refusals or len(self._refusals) > 1 or not self._replicas.others(self._key, self.tried)
            return own if self.last else choice(self.tried)
        replica = choice(self.tried)
        self.last = not self._replicas.others(self._key, [replica])
        return replica

    def again(self, replica: Replica, error: ServiceError, *, waits: bool = True) -> bool:
        """Return whether to ask again: once after a lost replica, and after a refusal that is not the last.

        A replica that was asked with `waits` False has not refused the work. If there is no other replica, it is asked again to queue the
        work.
        """
        self.tried.append(replica)
        if isinstance(error, ReplicaLost):
            again, self._lost = not self._lost, True
            return again
        if not waits and isinstance(error, Overloaded):
            self._full.append(replica)
            return True
        if not isinstance(error, Overloaded | NotReady) or self.last:
            return False
        self._refusals.append(replica)
        self.tried = [each for each in self.tried if each not in self._full]
        return True


def name_of_request(client: str, ids: Sequence[int]) -> str:
    """Return a name of the request with these token ids that is the same in every gateway, also over another connection of its client."""
    return f"{name_of(client)} {list(ids[:_NAMING_TOKENS])}"
