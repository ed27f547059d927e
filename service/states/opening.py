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
    """Raise SettingsError if a store at `location` cannot be shared by several processes, as the profile `split` requires."""
    if location == IN_MEMORY:
        raise SettingsError(
            "states=memory is a store of one process, and profile split has several: name a directory, or redis:// for several machines"
        )


def open_engine(location: str) -> GroupingEngine:
    """Return the engine of the store at `location`, for use on one thread. Raises StoreFailed."""
    if location.startswith(("redis://", "rediss://")):
        try:
            from service.states.redis import RedisEngine
        except ModuleNotFoundError:
            raise StoreFailed("a store in Redis needs redis-py: pip install 'attnserve[redis]'") from None
        return RedisEngine(location, password=os.environ.get(STATES_PASSWORD))
    return SqliteEngine(None if location == IN_MEMORY else Path(location).expanduser())
