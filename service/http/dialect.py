"""An HTTP dialect: a set of paths, and a format for errors.

Errors of the framework (unknown path, wrong method, body too large, no key) also have the error format of the path's dialect.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from service.errors import ServiceError


@dataclass(frozen=True)
class Dialect:
    """A dialect. `render` returns the status and the body for an error. A path belongs to the dialect with the longest matching prefix."""

    name: str
    prefixes: tuple[str, ...]
    render: Callable[[ServiceError], tuple[int, Any]]


def dialect_of(path: str, dialects: tuple[Dialect, ...]) -> Dialect:
    """Return the dialect of a path, or the first dialect if the path is unknown. The prefix "/" matches only the root path."""
    matches = [
        (len(prefix), dialect)
        for dialect in dialects
        for prefix in dialect.prefixes
        if path == prefix or (prefix != "/" and path.startswith(f"{prefix}/"))
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else dialects[0]
