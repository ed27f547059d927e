"""Writes documents to the store without waiting. If a document is lost, its state is computed again."""

import logging
import threading
from collections.abc import Callable

from service.errors import ServiceError
from service.states.engine import StateEngine
from service.states.record import Quota
from service.states.store import Store

NO_QUOTA = Quota(states=2**31, size=2**62)  # for documents whose number and size are limited by their writer

log = logging.getLogger("attnserve")


class Writer:
    """Makes up to `most` writes at a time, from any thread. Errors are only logged, with `what` as the name of the document."""

    def __init__(self, store: Store, most: int, what: str) -> None:
        self._store, self._most, self._what = store, most, what
        self._lock = threading.Lock()
        self._writing = 0

    @property
    def has_room(self) -> bool:
        return self._writing < self._most

    def begin(self, write: Callable[[StateEngine], object]) -> bool:
        """Begin a write. Returns False if it cannot begin, because too many are in progress or the store takes no calls."""
        with self._lock:
            if not self.has_room:
                return False
            self._writing += 1
        try:
            self._store.submit(write).add_done_callback(lambda done: self._ended(done.exception()))
        except ServiceError as error:
            self._ended(error)
            return False
        return True

    def _ended(self, error: BaseException | None) -> None:
        with self._lock:
            self._writing -= 1
        if error is not None:
            log.warning("%s could not be written: %s", self._what, error)
