"""Opens the store that the settings name."""

import os
from pathlib import Path

from service.errors import StoreFailed
from service.settings import IN_MEMORY, STATES_PASSWORD, SettingsError
from service.states.sqlite import SqliteEngine
from service.states.store import GroupingEngine, Observer, Store


def open_store(location: str, observer: Observer | None = None) -> Store:
    """Open the store at `location`: `memory`, a directory, or a URL of Redis. Raises StoreFailed if it cannot be opened."""
    return Store(open_engine(location), observer)


def check_shared(location: str) -> None:
    """Raise SettingsError if each process of profile split would have a store of its own."""
    if location == IN_MEMORY:
        raise SettingsError(
            "states=memory is a store of one process, and profile split has several: name a directory, or redis:// for several machines"
        )


def open_engine(location: str) -> GroupingEngine:
    """The engine of `open_store`, for one thread."""
    if location.startswith(("redis://", "rediss://")):
        try:
            from service.states.redis import RedisEngine
        except ModuleNotFoundError:
            raise StoreFailed("a store in Redis needs redis-py: pip install 'attnserve[redis]'") from None
        return RedisEngine(location, password=os.environ.get(STATES_PASSWORD))
    return SqliteEngine(None if location == IN_MEMORY else Path(location).expanduser())
