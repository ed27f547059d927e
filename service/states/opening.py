"""Opens the store that the settings name."""

from pathlib import Path

from service.states.sqlite import SqliteEngine
from service.states.store import Store

MEMORY = "memory"


def open_store(location: str) -> Store:
    """Open the store at `location`: `memory`, or a directory. Raises StoreFailed if it cannot be opened."""
    return Store(SqliteEngine(None if location == MEMORY else Path(location).expanduser()))
