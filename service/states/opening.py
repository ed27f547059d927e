"""Opens the store that the settings name."""

import os
from importlib.util import find_spec
from pathlib import Path

from service.settings import IN_MEMORY, STATES_PASSWORD, Settings, SettingsError
from service.states.engine import StateEngine
from service.states.store import Observer, Store


def open_store(location: str, observer: Observer | None = None) -> Store:
    """Open the store at `location`: `memory`, a directory, or a URL of Redis. Raises StoreFailed if it cannot be opened."""
    return Store(open_engine(location), observer)


def check(settings: Settings) -> None:
    """Raise SettingsError if the store cannot be used here: in memory by the processes of profile `split`, or in Redis without redis-py.
    Opens nothing, so it can be called before Ray is started."""
    if settings.states == IN_MEMORY and settings.profile == "split":
        raise SettingsError(
            "states=memory is a store of one process, and profile split has several: name a directory, or redis:// for several machines"
        )
    _in_redis(settings.states)


def open_engine(location: str) -> StateEngine:
    """Return the engine of the store at `location`, for use on one thread. Raises StoreFailed or SettingsError."""
    if _in_redis(location):
        from service.states.redis import RedisEngine

        return RedisEngine(location, password=os.environ.get(STATES_PASSWORD))
    from service.states.sqlite import SqliteEngine  # here, because the command that only checks the settings keeps what it imports

    return SqliteEngine(None if location == IN_MEMORY else Path(location).expanduser())


def _in_redis(location: str) -> bool:
    """Return whether a store is in Redis. Raises SettingsError if it is, and redis-py is not installed."""
    in_redis = location.startswith(("redis://", "rediss://"))
    if in_redis and find_spec("redis") is None:
        raise SettingsError("a store in Redis needs redis-py, which is not installed: pip install 'attnserve[redis]'")
    return in_redis
