"""An HTTP dialect: its paths, and the form of its errors.

Errors of the framework (unknown path, wrong method, body too large, no key) also have the form of the dialect of their path.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from service.errors import ServiceError


@dataclass(frozen=True)
class Dialect:
    """`render` returns status and body of an error. `prefixes` are the paths of the dialect: the longest match wins."""

    name: str
    prefixes: tuple[str, ...]
    render: Callable[[ServiceError], tuple[int, Any]]


def dialect_of(path: str, dialects: tuple[Dialect, ...]) -> Dialect:
    """The dialect of a path; the first one for an unknown path. The prefix "/" matches only the root."""
    matches = [
        (len(prefix), dialect)
        for dialect in dialects
        for prefix in dialect.prefixes
        if path == prefix or (prefix != "/" and path.startswith(f"{prefix}/"))
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else dialects[0]
