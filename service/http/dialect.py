"""What an HTTP dialect is: the paths that speak it, and the form of its errors.

Errors of the framework too (no such path, wrong method, body too large, no key) are answered in the form of the path that was called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from service.errors import ServiceError


@dataclass(frozen=True)
class Dialect:
    """`render` gives status and body of an error; `prefixes` are the paths that speak this dialect, the longest match wins."""

    name: str
    prefixes: tuple[str, ...]
    render: Callable[[ServiceError], tuple[int, Any]]


def dialect_of(path: str, dialects: tuple[Dialect, ...]) -> Dialect:
    """The dialect of a path; unknown paths speak the first one. The prefix "/" is the root alone."""
    matches = [
        (len(prefix), dialect)
        for dialect in dialects
        for prefix in dialect.prefixes
        if path == prefix or (prefix != "/" and path.startswith(f"{prefix}/"))
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else dialects[0]
